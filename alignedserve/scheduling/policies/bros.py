"""Real-time requests by the time to their next token, best-effort ones with the rest (BROS, Wan et al., 2025).

One decision, as Algorithm 1 of the paper (section 4.2):

1. The real-time requests in ascending order of residual time, as many as keep the iteration within the residual time of
   the first. One that lacks blocks takes them from best-effort requests, block by block (section 5.2).
2. The best-effort requests in ascending order of the tokens to swap in. One for which there is no time or place left
   may replace the real-time request with most time left.
3. The batch size for the next decision: doubled, or back to its base if step 1 ran out of time.

A prompt that alone takes longer than any decode may wait for a token never fits beside decodes, and the paper has none.
Here it runs at once beside the decodes, which would be late whenever it ran; with `long_prompts_wait` it runs when no
request decodes.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.model import chunk_within
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policy import IterationPlan, PlannedEviction, WorkerView
from alignedserve.scheduling.sharing_packer import BlockSearch, FoundBlocks, SharingPacker
from alignedserve.scheduling.table import Floats, Ints
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
    """The policy: algorithm 1 before every iteration. The page docs/policies/bros.md has an example."""

    def __init__(self, config: BrosConfig) -> None:
        self._config = config
        self._batch_size = config.base_batch_size
        self._stood_back = False  # decodes, in the latest iteration, for a prompt that is too long to fit beside them

    def plan(self, view: WorkerView) -> IterationPlan:
        stand_back = not (self._stood_back or self._config.long_prompts_wait)
        packing = _Packing(view, self._batch_size, stand_back=stand_back)
        is_in_time = packing.pack_real_time()
        packing.pack_best_effort()
        if not packing.packer.rows:
            packing.pack_earliest()
        self._batch_size = (
            self._next_batch_size(view.limits.max_running_requests) if is_in_time else self._config.base_batch_size
        )
        self._stood_back = packing.has_stood_back
        return packing.packer.plan()

    def _next_batch_size(self, max_running_requests: int) -> int:
        return min(
            self._batch_size * self._config.batch_growth, max(max_running_requests, self._config.base_batch_size)
        )


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


class _Outcome(enum.Enum):
    JOINED = enum.auto()
    NO_PLACE = enum.auto()  # or no tokens
    NO_BLOCKS = enum.auto()
    NO_TIME = enum.auto()


class _Packing:
    def __init__(self, view: WorkerView, batch_size: int, *, stand_back: bool) -> None:
        self._view = view
        self.packer = SharingPacker(view)
        self.packer.num_places_left = min(self.packer.num_places_left, batch_size)
        left_s = residual_s(view)
        self._residual_s: list[float] = left_s.tolist()
        self._num_cached: list[int] = view.table.num_cached.tolist()
        self._num_blocks: list[int] = view.table.num_blocks.tolist()
        self._evicted: set[int] = set()
        self._replaceable: list[int] = []  # packed real-time rows, least urgent last
        self._is_short = False  # blocks were lacking: only requests with a cache that need none continue
        self._stand_back = stand_back
        self._beside: list[int] = []  # real-time decodes beside a prompt that is too long
        self._real_time, self._budget_s = self._by_urgency(left_s)
        self._best_effort = self._by_swap_cost()

    @property
    def has_stood_back(self) -> bool:
        return not all(row in self.packer for row in self._beside)

    # --- the orders

    def _by_urgency(self, left_s: Floats) -> tuple[list[int], float]:
        """Return the real-time rows, and the residual time of the first (inf without any).

        Rows whose SLO cannot be met even by an iteration of their own come last: no time can be kept for them.
        """
        table = self._view.table
        rows = np.flatnonzero(table.is_real_time)
        left = left_s[rows]
        ranked = np.lexsort((table.order[rows], table.arrival_s[rows], table.priority[rows], left))
        if (prompt := self._overlong(rows[ranked])) is not None:
            return self._around(prompt, rows[ranked], left[ranked])
        urgent: list[int] = rows[ranked].tolist()
        first = int(np.searchsorted(left[ranked], self._alone_s(None)))
        while first < len(urgent) and self._alone_s(urgent[first]) > self._residual_s[urgent[first]]:
            first += 1
        budget_s = self._residual_s[urgent[first]] if first < len(urgent) else np.inf
        return urgent[first:] + urgent[:first], budget_s

    def _overlong(self, ranked: Ints) -> int | None:
        """Return the first prompt of these rows that no iteration with the decodes has time for; None: there is none.

        Decodes that just stood back for an overlong prompt go before the next one.
        """
        table, view = self._view.table, self._view
        is_decoding = table.is_decoding[ranked]
        prompts, decodes = ranked[~is_decoding], ranked[is_decoding]
        allowed_s = float(table.tpot_s[decodes].min(initial=np.inf))
        if not self._stand_back or not len(prompts) or allowed_s == np.inf:
            return None
        beside = IterationWork()
        note_decodes(beside, table, decodes)
        at_most = view.limits.max_tokens
        longest = chunk_within(view.costs, beside, num_cached=0, at_most=at_most, budget_s=allowed_s)
        overlong = prompts[table.num_remaining[prompts] > longest]
        return int(overlong[0]) if len(overlong) else None

    def _around(self, prompt: int, ranked: Ints, left_s: Floats) -> tuple[list[int], float]:
        """Return the order with such a prompt: it, the decodes, the others; and the residual time of the first that can
        still be met with it and them."""
        table = self._view.table
        others = ranked[ranked != prompt]
        decodes, prompts = others[table.is_decoding[others]], others[~table.is_decoding[others]]
        work = IterationWork()
        note_decodes(work, table, decodes)
        self.packer.note_work(work, prompt, self.packer.unchunked(prompt))
        budget_s = float(left_s[left_s >= self._view.costs.iteration_s(work)].min(initial=np.inf))
        self._beside = decodes.tolist()
        return [prompt, *self._beside, *prompts.tolist()], budget_s

    def _alone_s(self, row: int | None) -> float:
        work = IterationWork()
        if row is None:
            work.add_decode(1)
        else:
            self.packer.note_work(work, row, self.packer.unchunked(row))
        return self._view.costs.iteration_s(work)

    def _by_swap_cost(self) -> list[int]:
        table = self._view.table
        rows = np.flatnonzero(~table.is_real_time)
        keys = (table.order, table.arrival_s, table.priority, ~table.is_decoding, table.num_swapped)
        ranked: list[int] = rows[np.lexsort(tuple(key[rows] for key in keys))].tolist()
        return ranked

    # --- packing

    def pack_real_time(self) -> bool:
        for row in self._candidates(self._real_time):
            outcome = self._join(row, self._budget_s)
            if outcome in (_Outcome.NO_PLACE, _Outcome.NO_TIME):
                return outcome is _Outcome.NO_PLACE
            can_wait = self._budget_s <= self._residual_s[row] < np.inf
            if outcome is _Outcome.JOINED and can_wait and not self.packer.joins(row):
                self._replaceable.append(row)
        return True

    def pack_best_effort(self) -> None:
        self._is_short = False
        for row in self._candidates(self._best_effort):
            outcome = self._join(row, self._budget_s)
            if outcome in (_Outcome.NO_PLACE, _Outcome.NO_TIME) and not self._replace(row):
                return

    def pack_earliest(self) -> None:
        table = self._view.table
        self._is_short = False
        for row in np.lexsort((table.order, table.arrival_s, ~table.is_real_time))[:1].tolist():
            self._join(row, np.inf)

    def _candidates(self, rows: list[int]) -> Iterator[int]:
        for row in rows:
            if row not in self._evicted and (self._num_cached[row] or not self._is_short):
                yield row

    def _replace(self, row: int) -> bool:
        if not self._replaceable:
            return False
        other = self._replaceable[-1]
        num_tokens = self.packer.withdraw(other)
        waits_s = self._residual_s[other] - self._view.history.mean_s
        if self._join(row, min(self._budget_s, waits_s)) is _Outcome.JOINED:
            self._replaceable.pop()
            return True
        self.packer.add(other, num_tokens)
        return False

    def _join(self, row: int, budget_s: float) -> _Outcome:
        packer = self.packer
        num_tokens = packer.unchunked(row)
        if packer.num_places_left < 1 or not 0 < num_tokens <= packer.num_tokens_left:
            return _Outcome.NO_PLACE
        blocks = self._find_blocks(row, num_tokens)
        if blocks is None:
            return _Outcome.NO_BLOCKS
        if blocks.evictions and self._time_with(row, num_tokens, blocks.evictions) > budget_s:
            return _Outcome.NO_TIME  # before any eviction, as evictions are not undone
        for part in blocks.evictions:
            packer.evict(*part)
            self._evicted.add(part.row)
        partner = blocks.partner
        is_added = packer.add(row, num_tokens) if partner is None else packer.join(row, num_tokens, partner)
        assert is_added, "packs what does not fit"
        if not blocks.evictions and packer.predicted_s() > budget_s:
            packer.withdraw(row)
            return _Outcome.NO_TIME
        return _Outcome.JOINED

    def _time_with(self, row: int, num_tokens: int, evictions: tuple[PlannedEviction, ...]) -> float:
        work = self.packer.work.copy()
        self.packer.note_work(work, row, num_tokens)
        work.swap_out_tokens += self._view.memory.copy_tokens(sum(part.num_tokens or 0 for part in evictions))
        return self._view.costs.iteration_s(work)

    # --- blocks: FindPreemptBlock and FindBlock (section 5.2)

    def _find_blocks(self, row: int, num_tokens: int) -> FoundBlocks | None:
        search = BlockSearch(self._view, self.packer)
        blocks = search.find(row, num_tokens, partial(self._victims, row), may_take=not self._is_short)
        self._is_short |= blocks is None
        return blocks

    def _victims(self, row: int) -> Iterator[int]:
        """Iterate over victims for this request: best-effort ones, the last in order first, then real-time ones.

        Victims of the same class arrived later, lest two requests evict each other in turn. A best-effort
        prompt takes from none, as long as any request runs.
        """
        table = self._view.table
        if not self._view.can_evict:
            return
        is_real_time = bool(table.is_real_time[row])
        if not is_real_time and not table.is_decoding[row] and self.packer.rows:
            return
        holders = chain(reversed(self._best_effort), reversed(self._real_time) if is_real_time else ())
        for other in holders:
            if not self._num_blocks[other] or other == row or other in self._evicted or other in self.packer:
                continue
            if self.packer.is_joined(other):
                continue
            is_later = (table.arrival_s[other], table.order[other]) > (table.arrival_s[row], table.order[row])
            if is_later or (is_real_time and not table.is_real_time[other]):
                yield other
