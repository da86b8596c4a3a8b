"""Apt-Serve (Gao et al., SIGMOD 2025): adaptive scheduling on a hybrid cache.

- `rank`: the value of a request is its pending time. Its cache may be of hidden vectors, which take fewer blocks and
  make every iteration slower for all: that lowers its value.
- `budget`: blocks, tokens and places.
- `fill`: a knapsack, greedily by value per block (`select`).
- `evict`: decodes that are left out lose their cache, the least valuable first, while blocks lack.

The page docs/policies/apt_serve.md has the formula, our interpretation of the paper, and an example.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.table import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class KnapsackItems:
    """Columns of equal length, in the order that breaks ties."""

    value: Floats  # of scheduling it with keys and values (seconds)
    num_blocks: Ints  # of keys and values; at least 1
    num_tokens: Ints  # to compute
    penalty: Floats  # of a hidden cache, to be subtracted from the value (seconds)
    hidden_blocks: Ints  # of a hidden cache; no fewer than `num_blocks` where there is none


class SelectionBudget(NamedTuple):
    """Resources left for candidates."""

    num_blocks: int
    num_tokens: int
    num_places: int
    hidden_tokens: int = 0  # that may be held in new hidden caches
    splits_last: bool = False  # the last one may compute a part of its tokens

    @property
    def is_left(self) -> bool:
        return min(self.num_blocks, self.num_tokens, self.num_places) > 0


class Selection(NamedTuple):
    """The scheduled candidates, densest first."""

    indices: Ints  # into the candidates
    is_hidden: Bools
    num_tokens: Ints
    value: float  # in all


class _Items(NamedTuple):
    owner: Ints  # index into the candidates
    is_first: Bools  # the cache itself; else the step from hidden vectors to keys and values
    num_blocks: Ints
    num_tokens: Ints
    gain: Floats

    def ordered(self, order: Ints) -> "_Items":
        return _Items._make(column[order] for column in self)


def select(candidates: KnapsackItems, budget: SelectionBudget) -> Selection:
    """Select candidates greedily by gain per block, or around the best single candidate if its value is greater.

    A candidate is left out, gets a hidden cache, or keys and values: the first cache is one item, the step
    to keys and values another. If only blocks are short, the value is at least half of the optimum (Apt-Serve,
    section 5). Places, tokens and the limit on hidden tokens have no such bound.
    """
    if not len(candidates.value) or not budget.is_left:
        return Selection(np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(0, np.int64), 0.0)
    is_hidden = _offered(candidates, budget)
    items = _items(candidates, is_hidden, budget)
    items = items.ordered(np.argsort(-(items.gain / items.num_blocks), kind="stable"))
    taken = _take(items, budget)
    alone = _value_alone(candidates, is_hidden, budget)
    best = int(np.argmax(alone))
    if items.gain[taken].sum() < alone[best]:
        items = items.ordered(np.argsort(items.owner != best, kind="stable"))
        taken = _take(items, budget)
    has_step = np.zeros_like(is_hidden)
    has_step[items.owner[taken & ~items.is_first]] = True
    indices, num_tokens = items.owner[taken & items.is_first], items.num_tokens[taken & items.is_first]
    before = np.cumsum(num_tokens) - num_tokens
    return Selection(
        indices,
        (is_hidden & ~has_step)[indices],
        np.minimum(num_tokens, budget.num_tokens - before),
        float(items.gain[taken].sum()),
    )


def _offered(candidates: KnapsackItems, budget: SelectionBudget) -> Bools:
    """Return which candidates first get a hidden cache: if it gains more per block than keys and values at once.

    (Or if keys and values alone do not fit.) The limit on hidden tokens goes to the densest.
    """
    value = candidates.value - candidates.penalty
    density = value / np.maximum(candidates.hidden_blocks, 1)
    is_denser = density >= candidates.value / candidates.num_blocks
    is_offered: Bools = (
        (candidates.hidden_blocks < candidates.num_blocks)
        & (candidates.hidden_blocks <= budget.num_blocks)
        & (value >= 0)
        & (is_denser | (candidates.num_blocks > budget.num_blocks))
    )
    (wanting,) = np.nonzero(is_offered)
    wanting = wanting[np.argsort(-density[wanting], kind="stable")]
    is_offered[wanting[np.cumsum(candidates.num_tokens[wanting]) > budget.hidden_tokens]] = False
    return is_offered


def _items(candidates: KnapsackItems, is_hidden: Bools, budget: SelectionBudget) -> _Items:
    fits = candidates.num_blocks <= budget.num_blocks
    first, second = np.flatnonzero(fits | is_hidden), np.flatnonzero(fits & is_hidden)
    num_blocks = np.where(is_hidden, candidates.hidden_blocks, candidates.num_blocks)
    gain = np.where(is_hidden, candidates.value - candidates.penalty, candidates.value)
    return _Items(
        owner=np.concatenate((first, second)),
        is_first=np.arange(len(first) + len(second)) < len(first),
        num_blocks=np.concatenate((num_blocks[first], (candidates.num_blocks - num_blocks)[second])),
        num_tokens=np.concatenate((candidates.num_tokens[first], np.zeros_like(second))),
        gain=np.concatenate((gain[first], candidates.penalty[second])),
    )


def _value_alone(candidates: KnapsackItems, is_hidden: Bools, budget: SelectionBudget) -> Floats:
    value = np.where(is_hidden, candidates.value - candidates.penalty, -np.inf)
    value = np.where(candidates.num_blocks <= budget.num_blocks, candidates.value, value)
    return np.where((candidates.num_tokens <= budget.num_tokens) | budget.splits_last, value, -np.inf)


def _take(items: _Items, budget: SelectionBudget) -> Bools:
    """Return which items fit, one after the other. Without its first cache a request takes no step."""
    num_blocks, num_tokens, num_places = budget[:3]
    taken, entered = np.zeros(len(items.owner), np.bool_), set()
    columns = (column.tolist() for column in items[:4])
    for at, (owner, is_first, blocks, tokens) in enumerate(zip(*columns, strict=True)):
        if blocks > num_blocks or is_first > num_places or not (is_first or owner in entered):
            continue
        if tokens <= num_tokens or (budget.splits_last and num_tokens > 0):
            taken[at] = True
            entered.add(owner)
            num_blocks, num_tokens, num_places = num_blocks - blocks, max(num_tokens - tokens, 0), num_places - is_first
            if num_blocks < 1:
                break
    return taken


_NEAR_ZERO_S = 1e-6  # the value of a request past its SLO: only the order among those depends on it
_REFERENCE_TOKENS = 4096  # hidden tokens at which their cost is evaluated: too many to overlap with other work


@dataclass(frozen=True, slots=True)
class AptServeConfig:
    """The paper's values, or else the values of the released scheduler or of vLLM, on which that is built."""

    hybrid_cache: bool = True  # False: keys and values only (the paper's ablation, Table 4)
    max_hidden_tokens: int = 7200  # held in hidden caches at a time (released scheduler)
    hidden_token_s: float | None = None  # rho, seconds per hidden token in an iteration; None: by the cost model
    expired_decay: float | None = None  # past its SLO, a value is multiplied by this (paper: 0.4); None: near zero
    watermark: float = 0.01  # share of the blocks that new caches leave free (vLLM)

    def __post_init__(self) -> None:
        for name, holds in (
            ("max_hidden_tokens", self.max_hidden_tokens >= 0),
            ("hidden_token_s", self.hidden_token_s is None or self.hidden_token_s >= 0),
            ("expired_decay", self.expired_decay is None or 0 < self.expired_decay <= 1),
            ("watermark", 0 <= self.watermark < 1),
        ):
            if not holds:
                raise ConfigError(f"{name} is out of range (it is {getattr(self, name)!r})")


class AptServe:
    """The policy: each iteration is prompts or decodes, whichever have been pending longer in all (section 5)."""

    def __init__(self, config: AptServeConfig) -> None:
        self._config = config

    def plan(self, view: WorkerView) -> IterationPlan:
        filling = _Filling(view, self._config)
        kinds = (filling.add_decodes, filling.add_prompts)
        for add in (filling.return_to_kv, *(kinds if filling.decodes_are_more_urgent() else reversed(kinds))):
            add()
            if filling.packer.num_scheduled:
                return filling.packer.plan()
        return _earliest(view)


class AptServeChunked:
    """The policy Apt-Serve-S (section 6.7): decodes first, then prompts in chunks with the tokens left."""

    def __init__(self, config: AptServeConfig) -> None:
        self._config = config

    def plan(self, view: WorkerView) -> IterationPlan:
        filling = _Filling(view, self._config, splits_prompts=True)
        filling.return_to_kv()
        filling.add_decodes()
        filling.add_prompts()
        return filling.packer.plan() if filling.packer.num_scheduled else _earliest(view)


def _earliest(view: WorkerView) -> IterationPlan:
    packer = Packer(view)
    packer.add_earliest(view.limits.max_tokens)
    return packer.plan()


class _Filling:
    def __init__(self, view: WorkerView, config: AptServeConfig, *, splits_prompts: bool = False) -> None:
        self._view, self._table, self._config, self._splits_prompts = view, view.table, config, splits_prompts
        table, self.packer = view.table, Packer(view)
        has_token = ~np.isnan(table.last_token_s)
        since_s = np.where(has_token, table.last_token_s, table.arrival_s)
        self._context_len = table.context_len
        self._pending_s = np.maximum(view.now - since_s, 0.0)
        self._slo_s = np.where(has_token, table.tpot_s, table.ttft_s)
        is_decoding, has_cache = table.is_decoding, (table.num_blocks > 0) | (table.num_swapped > 0)
        has_begun = has_cache & ~is_decoding  # prompts longer than an iteration, which keep blocks for their rest
        self.packer.reserve(self._context_len, has_begun)
        self._running = np.flatnonzero(is_decoding)
        self._begun: list[int] = table.by_arrival(np.flatnonzero(has_begun)).tolist()
        self._waiting = np.flatnonzero(~has_cache)
        self._is_overtaken = False  # a request has been preempted: no new one overtakes it

    def decodes_are_more_urgent(self) -> bool:
        running_s = float(self._pending_s[self._running].sum())
        return running_s > float(self._pending_s.sum()) - running_s

    # --- fill

    def return_to_kv(self) -> None:
        """Compute costly hidden caches again, as keys and values."""
        table, packer = self._table, self.packer
        rows = table.by_arrival(self._running[self._is_costly(self._running)])
        more = self._blocks(rows, is_hidden=False) - table.num_blocks[rows]
        num_tokens = packer.num_tokens_left - len(self._running)
        fits = (np.cumsum(more) <= packer.num_free - self._watermark()) & (
            np.cumsum(self._context_len[rows]) <= num_tokens
        )
        self._running = self._running[~np.isin(self._running, rows[fits])]
        for row in rows[fits].tolist():
            packer.drop(row)
            packer.add(row, int(self._context_len[row]))

    def add_decodes(self) -> None:
        packer, rows, max_running_requests = self.packer, self._awake(), self._view.limits.max_running_requests
        is_short = int(self._more_blocks(rows).sum()) > packer.num_free
        if is_short or len(rows) > min(packer.num_tokens_left, max_running_requests):
            rows = self._chosen_decodes(max_running_requests)
        packer.add_decodes(rows)

    def _chosen_decodes(self, num_places: int) -> Ints:
        """Return the decodes to schedule; evict others for them."""
        packer, table = self.packer, self._table
        rows = table.by_arrival(self._running)
        held = self._freed(rows)
        num_blocks = np.maximum(self._more_blocks(rows) + held, 1)
        penalty = np.where(table.is_hidden[rows], self._penalty(rows), 0.0)
        value = np.maximum(self._value(rows) - penalty, _NEAR_ZERO_S)
        of_one_kind = KnapsackItems(value, num_blocks, np.ones_like(rows), np.zeros_like(value), num_blocks)
        budget = SelectionBudget(packer.num_free + int(held.sum()), packer.num_tokens_left, num_places)
        chosen = select(of_one_kind, budget).indices
        is_left = np.ones(len(rows), np.bool_)
        is_left[chosen] = False
        left = np.flatnonzero(is_left)[::-1]
        left = left[np.argsort((value / num_blocks)[left], kind="stable")]  # least valuable first
        self._evict(rows[left], int(self._more_blocks(rows[chosen]).sum()))
        return rows[chosen]

    def add_prompts(self) -> None:
        packer, table = self.packer, self._table
        num_places = self._view.limits.max_running_requests - int(table.is_decoding.sum()) - len(self._begun)
        for row in self._begun:
            if num_tokens := min(packer.remaining(row), packer.num_tokens_left):
                packer.add(row, num_tokens)
        num_hidden = self._config.max_hidden_tokens - int(self._context_len[table.is_hidden].sum())
        num_free = packer.num_free - self._watermark()
        budget = SelectionBudget(num_free, packer.num_tokens_left, num_places, num_hidden, self._splits_prompts)
        if len(self._waiting) and budget.is_left and not self._is_overtaken:
            rows = table.by_arrival(self._waiting)
            selected = select(self._candidates(rows), budget)
            columns = (rows[selected.indices], selected.num_tokens, selected.is_hidden)
            for row, num_tokens, is_hidden in zip(*(column.tolist() for column in columns), strict=True):
                packer.add(row, num_tokens, is_hidden=is_hidden)

    def _awake(self) -> Ints:
        """Return running rows; rows with a costly hidden cache pause until it is cheap.

        They pause until they are past their SLO at the latest, and not at all if no other request runs.
        """
        rows = self._running
        awake = rows[~self._is_costly(rows) | (self._pending_s[rows] > self._slo_s[rows])]
        return awake if len(awake) else rows

    def _is_costly(self, rows: Ints) -> Bools:
        is_costly = self._table.is_hidden[rows]
        if is_costly.any():
            pending_s = self._pending_s[rows]
            gain = (pending_s - self._penalty(rows)) / self._blocks(rows)
            is_costly = is_costly & (gain < pending_s / self._blocks(rows, is_hidden=False))
        return is_costly

    def _candidates(self, rows: Ints) -> KnapsackItems:
        num_tokens = self._table.num_remaining[rows]
        if not self._splits_prompts:  # then a prompt longer than an iteration fills one alone
            num_tokens = np.minimum(num_tokens, self._view.limits.max_tokens)
        num_blocks = self._blocks(rows, is_hidden=False)
        value = self._value(rows)
        ratio = self._view.memory.hidden_ratio
        if not self._config.hybrid_cache or ratio is None or ratio >= 1:
            return KnapsackItems(value, num_blocks, num_tokens, np.zeros_like(value), num_blocks)
        return KnapsackItems(value, num_blocks, num_tokens, self._penalty(rows), self._blocks(rows, is_hidden=True))

    # --- evict

    def _freed(self, rows: Ints) -> Ints:
        """Return the blocks that each row alone would free: what others use as well stays, whichever are chosen."""
        return np.array([self.packer.num_freed_by([row]) for row in rows.tolist()], np.int64)

    def _evict(self, rows: Ints, num_blocks: int) -> None:
        held = self._freed(rows)
        count = int((np.cumsum(held) - held + self.packer.num_free < num_blocks).sum())
        self._is_overtaken = count > 0
        for row in rows[:count].tolist():
            self.packer.drop(row)

    # --- rank

    def _value(self, rows: Ints) -> Floats:
        pending_s, decay = self._pending_s[rows], self._config.expired_decay
        expired = np.full_like(pending_s, _NEAR_ZERO_S) if decay is None else decay * pending_s
        return np.where(pending_s > self._slo_s[rows], expired, pending_s)

    def _penalty(self, rows: Ints) -> Floats:
        token_s = self._config.hidden_token_s
        if token_s is None:
            token_s = hidden_token_s(self._view.costs)
        return self._context_len[rows].astype(np.float64) * (token_s * len(self._view.table))

    def _blocks(self, rows: Ints, *, is_hidden: bool | None = None) -> Ints:
        table = self._view.table
        kinds = table.is_hidden[rows] if is_hidden is None else np.full(len(rows), is_hidden)
        return self._view.memory.blocks_for_each(self._context_len[rows], is_hidden=kinds)

    def _more_blocks(self, rows: Ints) -> Ints:
        return self._blocks(rows) - self._view.table.num_blocks[rows]

    def _watermark(self) -> int:
        memory = self._view.memory
        return 0 if memory.num_free == memory.num_blocks else int(self._config.watermark * memory.num_blocks)


def hidden_token_s(costs: CostModel) -> float:
    """Return rho: the seconds that each token of a hidden cache adds to an iteration (equation 6)."""
    plain, hidden = IterationWork(), IterationWork()
    plain.add_decodes(1, _REFERENCE_TOKENS, _REFERENCE_TOKENS)
    hidden.add_decodes(1, _REFERENCE_TOKENS, _REFERENCE_TOKENS, _REFERENCE_TOKENS)
    return max(costs.iteration_s(hidden) - costs.iteration_s(plain), 0.0) / _REFERENCE_TOKENS
