"""Real-time requests by the time to their next token, best-effort ones with the rest (BROS, Wan et al., 2025).

One decision, as Algorithm 1 of the paper (section 4.2):

- `rank`: real-time requests by residual time; best-effort ones by the tokens to swap in.
- `budget`: the residual time of the first real-time request that can still be in time.
- `fill`: real-time requests within the budget, then best-effort ones. A best-effort request for which there is no time
  or place left may replace the real-time request with most time left.
- `evict`: a real-time request takes blocks from best-effort ones, block by block (section 5.2).

The batch size for the next decision is doubled, or back at its base if real-time requests ran out of time.

A prompt that alone takes longer than any decode may wait for a token never fits beside decodes, and the paper has none.
Here it runs at once beside the decodes, which would be late whenever it ran; with `long_prompts_wait` it runs when no
request decodes.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.model import chunk_within
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.sharing_packer import BlockSearch, SharingPacker
from alignedserve.scheduling.table import Floats, Ints, RequestTable
from alignedserve.scheduling.table_operations import note_decodes


@dataclass(frozen=True, slots=True)
class BrosConfig:
    """The paper's values (section 4.2, adaptive batch sizing)."""

    base_batch_size: int = 128
    batch_growth: int = 2  # factor per iteration in which no real-time request ran out of time
    long_prompts_wait: bool = False  # one too long to fit beside any decode, for the end of all: good for short answers
    share_blocks: bool = True  # of a real-time and a best-effort request; False: the worker has a prefix cache instead

    def __post_init__(self) -> None:
        for name in ("base_batch_size", "batch_growth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"policy 'bros': {name} must be at least 1")


class Bros:
    """The policy. The page docs/policies/bros.md has an example."""

    def __init__(self, config: BrosConfig) -> None:
        self._config = config
        self._batch_size = config.base_batch_size
        self._stood_back = False  # decodes, in the latest iteration, for a prompt that is too long to fit beside them

    def plan(self, view: WorkerView) -> IterationPlan:
        config, packer = self._config, SharingPacker(view)
        packer.num_places_left = min(packer.num_places_left, self._batch_size)
        order = rank(view, packer, stand_back=not (self._stood_back or config.long_prompts_wait))
        is_in_time = _Filling(view, packer, order).fill()
        most = max(view.limits.max_running_requests, config.base_batch_size)
        self._batch_size = min(self._batch_size * config.batch_growth, most) if is_in_time else config.base_batch_size
        self._stood_back = not all(row in packer for row in order.beside)
        return packer.plan()


# --- rank


class BrosOrder(NamedTuple):
    """The order of one decision, and its budget."""

    real_time: list[int]
    best_effort: list[int]
    budget_s: float
    left_s: list[float]  # residual times, by row
    beside: tuple[int, ...] = ()  # real-time decodes beside a prompt that is too long


def residual_s(view: WorkerView) -> Floats:
    """Return the seconds that each request's next iteration may take, T_SLO - t_i - (k_i - 1) T_avg; inf without SLO.

    t_i: since the latest token, or since arrival. k_i: iterations up to the next token, 1 for all but a prompt longer
    than an iteration may be. (n,)
    """
    table = view.table
    due_s = np.where(table.num_generated == 0, table.arrival_s + table.ttft_s, table.last_token_s + table.tpot_s)
    later = np.maximum(-(-table.num_remaining // view.limits.max_tokens) - 1, 0)
    left: Floats = due_s - view.now - later * view.history.mean_s
    return left


def rank(view: WorkerView, packer: SharingPacker, *, stand_back: bool) -> BrosOrder:
    """Return the order of both classes. `stand_back`: decodes may, for a prompt that is too long to fit beside them."""
    table, left_s = view.table, residual_s(view)
    rows = np.flatnonzero(table.is_real_time)
    rows = rows[np.lexsort((table.order[rows], table.arrival_s[rows], table.priority[rows], left_s[rows]))]
    best_effort = _by_swap_cost(table)
    prompt = _overlong(view, rows) if stand_back else None
    if prompt is not None:
        is_decoding, is_other = table.is_decoding[rows], rows != prompt
        decodes = rows[is_decoding & is_other]
        budget_s = _budget_beside(view, packer, prompt, decodes, left_s[rows])
        real_time = [prompt, *decodes.tolist(), *rows[~is_decoding & is_other].tolist()]
        return BrosOrder(real_time, best_effort, budget_s, left_s.tolist(), tuple(decodes.tolist()))
    num_late, budget_s = _budget(view, packer, rows, left_s)
    real_time = np.roll(rows, -num_late).tolist()  # no time can be kept for the late ones
    return BrosOrder(real_time, best_effort, budget_s, left_s.tolist())


def _by_swap_cost(table: RequestTable) -> list[int]:
    rows = np.flatnonzero(~table.is_real_time)
    keys = (table.order, table.arrival_s, table.priority, ~table.is_decoding, table.num_swapped)
    ranked: list[int] = rows[np.lexsort(tuple(key[rows] for key in keys))].tolist()
    return ranked


def _overlong(view: WorkerView, ranked: Ints) -> int | None:
    """Return the first prompt of these rows that no iteration with the decodes has time for; None: there is none."""
    table, is_decoding = view.table, view.table.is_decoding[ranked]
    prompts, decodes = ranked[~is_decoding], ranked[is_decoding]
    allowed_s = float(table.tpot_s[decodes].min(initial=np.inf))
    if not len(prompts) or allowed_s == np.inf:
        return None
    beside, at_most = IterationWork(), view.limits.max_tokens
    note_decodes(beside, table, decodes)
    longest = chunk_within(view.costs, beside, num_cached=0, at_most=at_most, budget_s=allowed_s)
    overlong = prompts[table.num_remaining[prompts] > longest]
    return int(overlong[0]) if len(overlong) else None


# --- budget


def _budget(view: WorkerView, packer: SharingPacker, ranked: Ints, left_s: Floats) -> tuple[int, float]:
    """Return how many of the first rows are late even in an iteration of their own, and the residual time of the next
    one; inf: there is none."""
    shortest = IterationWork()
    shortest.add_decode(1)
    first = int(np.searchsorted(left_s[ranked], view.costs.iteration_s(shortest)))
    for row in ranked[first:].tolist():
        alone = IterationWork()
        packer.note_work(alone, row, packer.unchunked(row))
        if view.costs.iteration_s(alone) <= left_s[row]:
            return first, float(left_s[row])
        first += 1
    return first, np.inf


def _budget_beside(view: WorkerView, packer: SharingPacker, prompt: int, decodes: Ints, left_s: Floats) -> float:
    """Return the least of these residual times that can be met by the prompt with the decodes; inf: there is none."""
    work = IterationWork()
    note_decodes(work, view.table, decodes)
    packer.note_work(work, prompt, packer.unchunked(prompt))
    return float(left_s[left_s >= view.costs.iteration_s(work)].min(initial=np.inf))


# --- fill and evict


class _Outcome(enum.Enum):
    JOINED = enum.auto()
    NO_PLACE = enum.auto()  # or no tokens
    NO_BLOCKS = enum.auto()
    NO_TIME = enum.auto()


class _Filling:
    def __init__(self, view: WorkerView, packer: SharingPacker, order: BrosOrder) -> None:
        self._view, self._packer, self._order = view, packer, order
        self._num_cached: list[int] = view.table.num_cached.tolist()
        self._num_blocks: list[int] = view.table.num_blocks.tolist()
        self._replaceable: list[int] = []  # packed real-time rows, least urgent last
        self._is_short = False  # blocks were lacking: only requests with a cache that need none continue

    def fill(self) -> bool:
        """Return whether real-time requests had time enough."""
        is_in_time = self._add_real_time()
        self._add_best_effort()
        if not self._packer.rows:
            table, self._is_short = self._view.table, False
            for row in np.lexsort((table.order, table.arrival_s, ~table.is_real_time))[:1].tolist():
                self._join(row, np.inf)
        return is_in_time

    def _add_real_time(self) -> bool:
        budget_s, left_s = self._order.budget_s, self._order.left_s
        for row in self._candidates(self._order.real_time):
            outcome = self._join(row, budget_s)
            if outcome in (_Outcome.NO_PLACE, _Outcome.NO_TIME):
                return outcome is _Outcome.NO_PLACE
            can_wait = budget_s <= left_s[row] < np.inf
            if outcome is _Outcome.JOINED and can_wait and not self._packer.joins(row):
                self._replaceable.append(row)
        return True

    def _add_best_effort(self) -> None:
        self._is_short = False
        for row in self._candidates(self._order.best_effort):
            outcome = self._join(row, self._order.budget_s)
            if outcome in (_Outcome.NO_PLACE, _Outcome.NO_TIME) and not self._replace(row):
                return

    def _candidates(self, rows: list[int]) -> Iterator[int]:
        for row in rows:
            if (self._num_cached[row] or not self._is_short) and not self._packer.is_evicted(row):
                yield row

    def _replace(self, row: int) -> bool:
        if not self._replaceable:
            return False
        other = self._replaceable[-1]
        num_tokens = self._packer.withdraw(other)
        waits_s = self._order.left_s[other] - self._view.history.mean_s
        if self._join(row, min(self._order.budget_s, waits_s)) is _Outcome.JOINED:
            self._replaceable.pop()
            return True
        self._packer.add(other, num_tokens)
        return False

    def _join(self, row: int, budget_s: float) -> _Outcome:
        packer, view = self._packer, self._view
        num_tokens = packer.unchunked(row)
        if packer.num_places_left < 1 or not 0 < num_tokens <= packer.num_tokens_left:
            return _Outcome.NO_PLACE
        victims = partial(self._victims, row)
        blocks = BlockSearch(view, packer).find(row, num_tokens, victims, may_take=not self._is_short)
        if blocks is None:
            self._is_short = True
            return _Outcome.NO_BLOCKS
        work = packer.work.copy()
        packer.note_work(work, row, num_tokens)
        work.swap_out_tokens += view.memory.copy_tokens(sum(part.num_tokens or 0 for part in blocks.evictions))
        if view.costs.iteration_s(work) > budget_s:  # before any eviction, as evictions are not undone
            return _Outcome.NO_TIME
        for part in blocks.evictions:
            packer.evict(*part)
        partner = blocks.partner
        is_added = packer.add(row, num_tokens) if partner is None else packer.join(row, num_tokens, partner)
        assert is_added, "packs what does not fit"
        return _Outcome.JOINED

    def _victims(self, row: int) -> Iterator[int]:
        """Iterate over victims for this request: best-effort ones, the last in order first, then real-time ones.

        Victims of the same class arrived later, lest two requests evict each other in turn. A best-effort prompt takes
        from none, as long as any request runs.
        """
        table, packer, is_real_time = self._view.table, self._packer, bool(self._view.table.is_real_time[row])
        if not self._view.can_evict or not (is_real_time or table.is_decoding[row] or not packer.rows):
            return
        for other in chain(reversed(self._order.best_effort), reversed(self._order.real_time) if is_real_time else ()):
            is_free = not self._num_blocks[other] or packer.is_evicted(other)
            if is_free or other == row or other in packer or packer.is_joined(other):
                continue
            is_later = (table.arrival_s[other], table.order[other]) > (table.arrival_s[row], table.order[row])
            if is_later or (is_real_time and not table.is_real_time[other]):
                yield other
