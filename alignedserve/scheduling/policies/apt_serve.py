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
from alignedserve.scheduling.policy import EvictionMode, IterationPlan, PlannedEviction, ScheduledRequest, WorkerView
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
        return _Items(*(column[order] for column in self))


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
        step = _Step(view, self._config)
        returning = step.returns_to_kv()
        if returning.scheduled:
            return returning
        kinds = (step.decodes, step.prompts) if step.decodes_are_more_urgent() else (step.prompts, step.decodes)
        plan = kinds[0]()
        plan = plan if plan.scheduled else kinds[1]()
        return plan if plan.scheduled else _earliest(view)


class AptServeChunked:
    """The policy Apt-Serve-S (section 6.7): decodes first, then prompts in chunks with the tokens left."""

    def __init__(self, config: AptServeConfig) -> None:
        self._config = config

    def plan(self, view: WorkerView) -> IterationPlan:
        step = _Step(view, self._config, splits_prompts=True)
        returning, decodes = step.returns_to_kv(), step.decodes()
        # A request just preempted is not overtaken by a new one in the same iteration.
        prompts = step.prompts(takes_new=not decodes.evictions)
        scheduled = returning.scheduled + decodes.scheduled + prompts.scheduled
        if not scheduled:
            return _earliest(view)
        return IterationPlan(scheduled, returning.evictions + decodes.evictions)


def _earliest(view: WorkerView) -> IterationPlan:
    packer = Packer(view)
    if view.held_blocks:
        packer.add_earliest(view.limits.max_tokens)
    return packer.plan()


class _Step:
    def __init__(self, view: WorkerView, config: AptServeConfig, *, splits_prompts: bool = False) -> None:
        self._view = view
        self._config = config
        self._splits_prompts = splits_prompts
        table = view.table
        has_token = ~np.isnan(table.last_token_s)
        since_s = np.where(has_token, table.last_token_s, table.arrival_s)
        self._context_len = table.context_len
        self._pending_s = np.maximum(view.now - since_s, 0.0)
        self._slo_s = np.where(has_token, table.tpot_s, table.ttft_s)
        is_decoding, has_cache = table.is_decoding, (table.num_blocks > 0) | (table.num_swapped > 0)
        self._running = np.flatnonzero(is_decoding)
        self._begun = table.by_arrival(np.flatnonzero(has_cache & ~is_decoding))  # prompts longer than an iteration
        self._waiting = np.flatnonzero(~has_cache)
        self._num_places_left = view.limits.max_running_requests - len(self._running) - len(self._begun)
        # Prompts that have begun continue: their later blocks are kept free.
        self._num_free = view.memory.num_free - int(self._more_blocks(self._begun).sum())
        self._num_tokens_left = view.limits.max_tokens

    def decodes_are_more_urgent(self) -> bool:
        running_s = float(self._pending_s[self._running].sum())
        return running_s > float(self._pending_s.sum()) - running_s

    def returns_to_kv(self) -> IterationPlan:
        table = self._view.table
        rows = table.by_arrival(self._running[self._is_costly(self._running)])
        more = self._blocks(rows, is_hidden=False) - table.num_blocks[rows]
        num_tokens = self._num_tokens_left - len(self._running)
        fits = (np.cumsum(more) <= self._num_free - self._watermark()) & (
            np.cumsum(self._context_len[rows]) <= num_tokens
        )
        rows, more = rows[fits], more[fits]
        self._running = self._running[~np.isin(self._running, rows)]
        scheduled = self._schedule(rows, self._context_len[rows], int(more.sum()))
        return IterationPlan(scheduled, tuple(PlannedEviction(row, EvictionMode.DROP) for row in rows.tolist()))

    def decodes(self) -> IterationPlan:
        rows, max_running_requests = self._rows_to_decode(), self._view.limits.max_running_requests
        more = int(self._more_blocks(rows).sum())
        if more <= self._num_free and len(rows) <= min(self._num_tokens_left, max_running_requests):
            return IterationPlan(self._schedule(rows, np.ones_like(rows), more))
        rows = self._view.table.by_arrival(self._running)
        held = self._view.own_blocks(rows)  # what others use as well stays, whichever are chosen
        num_blocks = np.maximum(self._more_blocks(rows) + held, 1)
        penalty = np.where(self._view.table.is_hidden[rows], self._penalty(rows), 0.0)
        value = np.maximum(self._value(rows) - penalty, _NEAR_ZERO_S)
        of_one_kind = KnapsackItems(value, num_blocks, np.ones_like(rows), np.zeros_like(value), num_blocks)
        budget = SelectionBudget(self._num_free + int(held.sum()), self._num_tokens_left, max_running_requests)
        chosen = select(of_one_kind, budget).indices
        more = int(self._more_blocks(rows[chosen]).sum())
        is_left = np.ones(len(rows), np.bool_)
        is_left[chosen] = False
        left = np.flatnonzero(is_left)[::-1]
        least_valuable_first = np.argsort((value / num_blocks)[left], kind="stable")
        evictions = self._evict(rows[left[least_valuable_first]], more)
        return IterationPlan(self._schedule(rows[chosen], np.ones_like(chosen), more), evictions)

    def prompts(self, *, takes_new: bool = True) -> IterationPlan:
        begun = self._continue_prompts()
        table = self._view.table
        num_free, num_hidden = self._num_free - self._watermark(), int(self._context_len[table.is_hidden].sum())
        budget = SelectionBudget(
            num_free,
            self._num_tokens_left,
            self._num_places_left,
            self._config.max_hidden_tokens - num_hidden,
            self._splits_prompts,
        )
        if not (takes_new and len(self._waiting) and budget.is_left):
            return IterationPlan(begun)
        rows = table.by_arrival(self._waiting)
        selected = select(self._candidates(rows), budget)
        scheduled = map(
            ScheduledRequest, rows[selected.indices].tolist(), selected.num_tokens.tolist(), selected.is_hidden.tolist()
        )
        return IterationPlan(begun + tuple(scheduled))

    # --- parts

    def _rows_to_decode(self) -> Ints:
        """Return running rows; rows with a costly hidden cache pause until it is cheap.

        They pause until they are past their SLO at the latest, and not at all if no other request runs.
        """
        rows = self._running
        awake = rows[~self._is_costly(rows) | (self._pending_s[rows] > self._slo_s[rows])]
        return awake if len(awake) else rows

    def _is_costly(self, rows: Ints) -> Bools:
        is_costly = self._view.table.is_hidden[rows]
        if is_costly.any():
            pending_s = self._pending_s[rows]
            gain = (pending_s - self._penalty(rows)) / self._blocks(rows)
            is_costly = is_costly & (gain < pending_s / self._blocks(rows, is_hidden=False))
        return is_costly

    def _continue_prompts(self) -> tuple[ScheduledRequest, ...]:
        remaining = self._view.table.num_remaining[self._begun]
        before = np.cumsum(remaining) - remaining
        num_tokens = np.minimum(remaining, self._num_tokens_left - before)
        goes_on = num_tokens > 0
        return self._schedule(self._begun[goes_on], num_tokens[goes_on], 0)

    def _candidates(self, rows: Ints) -> KnapsackItems:
        num_tokens = self._view.table.num_remaining[rows]
        if not self._splits_prompts:  # then a prompt longer than an iteration fills one alone
            num_tokens = np.minimum(num_tokens, self._view.limits.max_tokens)
        num_blocks = self._blocks(rows, is_hidden=False)
        value = self._value(rows)
        ratio = self._view.memory.hidden_ratio
        if not self._config.hybrid_cache or ratio is None or ratio >= 1:
            return KnapsackItems(value, num_blocks, num_tokens, np.zeros_like(value), num_blocks)
        return KnapsackItems(value, num_blocks, num_tokens, self._penalty(rows), self._blocks(rows, is_hidden=True))

    def _evict(self, rows: Ints, num_blocks: int) -> tuple[PlannedEviction, ...]:
        held = self._view.own_blocks(rows)
        count = int((np.cumsum(held) - held + self._num_free < num_blocks).sum())
        self._num_free += int(held[:count].sum())
        return tuple(PlannedEviction(row, EvictionMode.DROP) for row in rows[:count].tolist())

    def _schedule(self, rows: Ints, num_tokens: Ints, num_blocks: int) -> tuple[ScheduledRequest, ...]:
        self._num_free -= num_blocks
        self._num_tokens_left -= int(num_tokens.sum())
        return tuple(map(ScheduledRequest, rows.tolist(), num_tokens.tolist()))

    # --- figures

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
