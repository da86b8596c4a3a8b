"""AccelGen: token budgets, urgency and selection by iteration-level SLOs (Shen and Sen).

- `rank`: by the time that a request can still wait (`urgency_of`).
- `budget`: the tokens that the tightest SLO in the batch allows, at the rate of the pivot.
- `fill`: decodes and urgent requests in that order; then of those about as urgent as the first that wait, whichever
  leaves least of tokens and memory.
- `evict`: urgent requests take memory from those that can wait longer, the longest first.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.packer import Packer
from alignedserve.scheduling.policy import IterationPlan, WorkerView
from alignedserve.scheduling.table import Bools, Floats, Ints

_STEP = 64  # forward sizes that are tried for the pivot are multiples of it
_LARGEST = 8192


@dataclass(frozen=True, slots=True)
class AccelgenConfig:
    """The paper's values; docs/policies/accelgen.md gives the reasons for values that the paper does not name."""

    gamma_s: float = 0.75  # remaining time within which requests count as equally urgent: section 6.1
    pivot_len: int | None = None  # S_pf; the paper measures 768 (OPT-13B) and 1 280 (OPT-175B). None: by the cost model
    saturation: float = 0.1  # then: the smallest forward size within this share of the best tokens per second
    long_prompt_len: int = 4096  # section 1
    default_tpot_s: float = 0.1875  # of real-time requests that have none: section 4.3
    default_ttft_s: float = 1.0
    default_deadline_s: float = 3600.0  # of best-effort requests without any SLO
    watermark: float = 0.01  # share of the blocks that a prompt leaves free (vLLM, on which it is built)
    reserve_prompts: bool = True  # a prompt begins where all of it fits, and keeps the blocks for its rest (vLLM)
    max_preemptions: int = 2  # of one request for more urgent ones
    starvation_s: float = 60.0  # a request that has missed its SLO preempts none before it has waited so long
    dynamic_chunking: bool = True  # False: /Chunk of section 6.3, chunks of static_chunk_len
    static_chunk_len: int = 512
    prioritisation: bool = True  # False: /Order, first come, first served
    multi_resource: bool = True  # False: /Batch, one after the other in the order of the queue


class Pivot(NamedTuple):
    """The forward size at which throughput saturates, and its duration."""

    num_tokens: int  # S_pf
    duration_s: float  # T_pf

    @property
    def rate(self) -> float:
        return self.num_tokens / self.duration_s


class Urgency(NamedTuple):
    """Urgency of each request, by row."""

    slo_s: Floats  # of the next iteration
    remaining_s: Floats  # T_r: the request can still wait so long
    may_preempt: Bools  # evicting others still helps


def find_pivot(costs: CostModel, config: AccelgenConfig) -> Pivot:
    """Return the pivot (section 4.2), by the cost model where the paper measures it."""

    def duration_s(num_tokens: int) -> float:
        work = IterationWork()
        work.add_chunk(num_tokens, 0, is_last=True)
        return costs.iteration_s(work)

    if config.pivot_len is not None:
        return Pivot(config.pivot_len, duration_s(config.pivot_len))
    sizes = range(_STEP, _LARGEST + 1, _STEP)
    rates = [size / duration_s(size) for size in sizes]
    size = next(size for size, rate in zip(sizes, rates, strict=True) if rate >= (1 - config.saturation) * max(rates))
    return Pivot(size, duration_s(size))


def urgency_of(view: WorkerView, config: AccelgenConfig, *, chunk_len: float, longest_s: float) -> Urgency:
    """Return the urgency of all requests (section 4.3). `chunk_len`: L_c, the average chunk; `longest_s`: T_max.

    A token with an SLO: T_r = SLO - T_w - N_ck * T_max. A deadline is spread evenly over the iterations of a request,
    and what one waits more or less than its part is carried to the next: the k-th of N is due at arrival +
    deadline * k / N, so that nothing needs to be remembered of a request but its progress.
    """
    table = view.table
    num_chunks = np.ceil(table.num_remaining / chunk_len)
    is_first = table.num_generated == 0
    slo_s = np.where(is_first, table.ttft_s, table.tpot_s)
    defaults = np.where(is_first, config.default_ttft_s, config.default_tpot_s)
    is_online = table.is_real_time & np.isinf(table.deadline_s)
    slo_s = np.where(np.isinf(slo_s) & is_online, defaults, slo_s)
    online_s = slo_s - (view.now - table.waits_since_s) - num_chunks * longest_s

    has_no_slo = np.isinf(slo_s) & np.isinf(table.deadline_s)
    deadline_s = np.where(has_no_slo, config.default_deadline_s, table.deadline_s)
    # The last chunk gives a token, so there is one iteration less than chunks and tokens.
    num_iterations = np.ceil(table.prompt_len / chunk_len) + table.predicted_len - 1
    num_after = num_chunks - 1 + np.maximum(table.predicted_len - table.num_generated, 1) - 1
    is_offline = np.isfinite(deadline_s)
    spread_s = np.where(is_offline, deadline_s, 0.0) / num_iterations
    due_s = table.arrival_s + spread_s * np.maximum(num_iterations - num_after, 0)
    offline_s = np.where(is_offline, due_s - view.now - longest_s - _preemption_s(view), np.inf)
    waited_s = view.now - table.waits_since_s
    is_missed = (waited_s >= slo_s) | (view.now - table.arrival_s >= deadline_s)
    return Urgency(
        np.minimum(slo_s, np.where(is_offline, spread_s, np.inf)),
        np.minimum(online_s, offline_s),
        ~is_missed | (waited_s >= config.starvation_s),
    )


def _preemption_s(view: WorkerView) -> float:
    table = view.table
    num_preemptions, num_tokens = int(table.num_preemptions.sum()), int(table.num_generated.sum())
    is_out = (table.num_preemptions > 0) & (table.num_blocks == 0)
    if not num_tokens or not is_out.any():
        return 0.0
    return float((view.now - table.waits_since_s[is_out]).max()) * min(num_preemptions / num_tokens, 1.0)


class Accelgen:
    """The policy; one instance per worker keeps the pivot of its cost model and the average length of a chunk."""

    def __init__(self, config: AccelgenConfig) -> None:
        self._config = config
        self._costs: CostModel | None = None
        self._pivot = Pivot(1, 1.0)
        self._chunk_len = 1.0

    def plan(self, view: WorkerView) -> IterationPlan:
        if self._costs is not view.costs:
            self._costs, self._pivot = view.costs, find_pivot(view.costs, self._config)
            self._chunk_len = float(self._pivot.num_tokens)
        longest_s = view.history.max_s or self._pivot.duration_s
        urgency = urgency_of(view, self._config, chunk_len=self._chunk_len, longest_s=longest_s)
        is_urgent = urgency.remaining_s <= longest_s
        if not self._config.prioritisation:
            urgency = urgency._replace(remaining_s=view.table.arrival_s - view.now)
            is_urgent = np.zeros(len(view.table), np.bool_)
        plan = _Filling(view, self._config, self._pivot, urgency).plan(is_urgent)
        for row, num_tokens, _ in plan.scheduled:
            if 1 < num_tokens < view.table.context_len[row]:
                self._chunk_len = 0.9 * self._chunk_len + 0.1 * num_tokens
        return plan


class _Filling:
    def __init__(self, view: WorkerView, config: AccelgenConfig, pivot: Pivot, urgency: Urgency) -> None:
        self._view, self._table, self._config, self._pivot = view, view.table, config, pivot
        self._slo_s, self._remaining_s, self._may_preempt = urgency
        self._is_decoding = self._table.is_decoding
        self._packer = Packer(view)
        if config.reserve_prompts:
            self._packer.reserve(self._table.context_len, (self._table.num_blocks > 0) & ~self._is_decoding)
        self._least_slo_s = np.inf  # SLO_min of those in the batch
        self._num_tokens = 0  # S_f
        self._has_prompt = False
        self._is_evicted = np.zeros(len(view.table), np.bool_)
        self._has_victims = view.can_evict

    def plan(self, is_urgent: Bools) -> IterationPlan:
        decodes = self._is_decoding & (self._table.num_swapped == 0)
        self._least_slo_s = float(self._slo_s[decodes].min(initial=np.inf))
        urgent = self._most_pressing(np.flatnonzero(is_urgent & ~decodes))
        self._add_pressing(self._ordered(np.concatenate((np.flatnonzero(decodes), urgent))))
        waiting = np.flatnonzero(~decodes & ~is_urgent & ~self._is_evicted)
        waiting = waiting[self._may_start(waiting)]
        if self._config.multi_resource:
            self._select(waiting)
        else:
            self._add_in_order(waiting)
        if not self._packer.rows:
            self._packer.add_earliest(max(self._token_budget(), 1))
        return self._packer.plan()

    # --- rank

    def _ordered(self, rows: Ints) -> Ints:
        table = self._table
        keys = (table.order[rows], table.arrival_s[rows], table.priority[rows], self._remaining_s[rows])
        ordered: Ints = rows[np.lexsort(keys)]
        return ordered

    def _most_pressing(self, rows: Ints) -> Ints:
        places = self._view.limits.max_running_requests
        if len(rows) <= places:
            return rows
        last_s = np.partition(self._remaining_s[rows], places - 1)[places - 1]
        first: Ints = rows[self._remaining_s[rows] <= last_s]
        return first

    def _may_start(self, rows: Ints) -> Bools:
        """Return which rows may compute: a long prompt begins when no other long prompt is under way."""
        is_long, has_begun = self._is_long(), self._table.num_blocks > 0
        is_served = is_long & has_begun & (self._table.num_remaining > 1) & ~self._is_evicted
        if not self._config.dynamic_chunking or not is_served.any():
            return np.ones(len(rows), np.bool_)
        return ~is_long[rows] | has_begun[rows]

    def _is_long(self) -> Bools:
        budget = self._pivot.rate * np.minimum(self._least_slo_s, self._slo_s)
        longest = np.minimum(np.minimum(budget, self._view.limits.max_tokens), self._config.long_prompt_len - 1)
        is_long: Bools = self._table.context_len > longest
        return is_long

    # --- budget

    def _token_budget(self, slo_s: float = np.inf) -> int:
        left = self._packer.num_tokens_left
        if not self._config.dynamic_chunking:
            return min(max(self._pivot.num_tokens - self._num_tokens, 0), left)
        budget = max(self._pivot.rate * min(self._least_slo_s, slo_s), 1.0)
        return int(min(budget - self._num_tokens, left)) if budget > self._num_tokens else 0

    def _demand(self, row: int, num_due: int = 0) -> int:
        """Return how many tokens the request computes beside `num_due` tokens of decodes that follow."""
        remaining, budget = self._packer.remaining(row), self._token_budget(float(self._slo_s[row])) - num_due
        if self._config.dynamic_chunking:
            return max(min(remaining, budget), 0)
        chunk = min(remaining, self._config.static_chunk_len, self._packer.num_tokens_left - num_due)
        return chunk if chunk <= budget or not self._has_prompt else 0

    def _watermark(self) -> int:
        memory, num_free = self._view.memory, self._packer.num_free
        return 0 if num_free == memory.num_blocks else min(int(self._config.watermark * memory.num_blocks), num_free)

    # --- fill

    def _add(self, row: int, num_tokens: int) -> bool:
        packer = self._packer
        if not packer.add(row, num_tokens):
            num_tokens = min(packer.chunk(row), num_tokens) if self._config.dynamic_chunking else 0
            if num_tokens < 1 or not packer.add(row, num_tokens):
                return False
        self._num_tokens += num_tokens
        self._least_slo_s = min(self._least_slo_s, float(self._slo_s[row]))
        self._has_prompt |= num_tokens > 1
        return True

    def _add_pressing(self, rows: Ints) -> None:
        """Add decodes and urgent requests; tokens and blocks of decodes that come later are left to them."""
        table, packer, size = self._table, self._packer, self._view.memory.block_size
        beside = self._view.memory.state_blocks
        is_decoding = table.num_remaining[rows] == 1
        needs_block = is_decoding & (table.num_cached[rows] == (table.num_blocks[rows] - beside) * size)
        # A prompt that has not begun begins only where it can be computed to its end.
        whole = np.where(table.num_blocks[rows] == 0, -(-table.context_len[rows] // size) + beside, 0)
        decodes_left, blocks_due, only_decodes = int(is_decoding.sum()), int(needs_block.sum()), False
        columns = (column.tolist() for column in (rows, is_decoding, needs_block, whole))
        for row, is_decode, is_due, num_whole in zip(*columns, strict=True):
            if only_decodes and not is_decode:
                continue
            if packer.num_places_left < 1 or self._token_budget() < 1:
                return
            decodes_left -= is_decode
            blocks_due -= is_due
            only_decodes = self._token_budget() <= decodes_left
            may_take = self._has_victims and self._may_preempt[row]
            if self._is_evicted[row] or (num_whole > packer.num_free - blocks_due and not may_take):
                continue
            num_tokens = 1 if is_decode else self._demand(row, decodes_left)
            if num_tokens and self._evict_until(row, num_tokens, num_whole, blocks_due):
                packer.num_free -= blocks_due
                self._add(row, num_tokens)
                packer.num_free += blocks_due

    def _select(self, waiting: Ints) -> None:
        """Add requests about as urgent as the first of the queue, each time the request that leaves least unused.

        Long prompts may be chunked, and prompts that have begun.
        """
        table, packer, remaining_s = self._table, self._packer, self._remaining_s[waiting]
        rows = self._ordered(waiting[remaining_s <= remaining_s.min(initial=np.inf) + self._config.gamma_s])
        can_cut = (self._is_long() | (table.num_blocks > 0))[rows]
        if len(rows) and not packer.rows:
            self._least_slo_s = float(self._slo_s[rows[0]])
        while len(rows) and packer.num_places_left:
            num_free = packer.num_free - self._watermark()
            demands, blocks, fits = self._demands(rows, can_cut, num_free)
            if not fits.any():
                return
            # As floats, which no memory is too large for.
            free_slots = (num_free - blocks).astype(np.float64) * self._view.memory.block_size
            left_over = (self._token_budget() - demands) ** 2 + free_slots**2
            best = int(np.where(fits, left_over, np.inf).argmin())
            added = self._add(int(rows[best]), int(demands[best]))
            assert added, "a request that fits is refused"
            is_next = fits.copy()
            is_next[best] = False
            if self._config.dynamic_chunking and can_cut[best]:
                is_next &= ~can_cut | (table.num_blocks[rows] > 0)
            rows, can_cut = rows[is_next], can_cut[is_next]

    def _demands(self, rows: Ints, can_cut: Bools, num_free: int) -> tuple[Ints, Ints, Bools]:
        """Return tokens and blocks for each of these rows, and which of them fit."""
        table, size, beside = self._table, self._view.memory.block_size, self._view.memory.state_blocks
        held, cached, remaining = table.num_blocks[rows], table.num_cached[rows], table.num_remaining[rows]
        whole, left = -(-table.context_len[rows] // size) + beside, self._packer.num_tokens_left
        if self._config.reserve_prompts:
            slots = np.where((held > 0) | (whole <= num_free), remaining, 0)
        else:
            slots = (held + num_free - beside) * size - cached
        if self._config.dynamic_chunking:
            allowed = self._pivot.rate * np.minimum(self._least_slo_s, self._slo_s[rows])
            allowed = np.minimum(allowed, left + self._num_tokens).astype(np.int64)
            budget = np.maximum(allowed - self._num_tokens, 0 if self._num_tokens else 1)
            demands = np.where(can_cut, np.minimum(np.minimum(remaining, budget), slots), remaining)
        else:
            demands = np.minimum(remaining, min(self._config.static_chunk_len, left))
            budget = np.full(len(rows), self._token_budget() if self._has_prompt else left)
        if self._config.reserve_prompts:
            blocks = np.where(held > 0, 0, whole)
        else:
            blocks = np.maximum(-(-(cached + demands) // size) + beside - held, 0)
        return demands, blocks, (demands > 0) & (demands <= budget) & (demands <= slots)

    def _add_in_order(self, waiting: Ints) -> None:
        packer = self._packer
        for row in self._ordered(self._most_pressing(waiting)).tolist():
            watermark, num_tokens = self._watermark(), self._demand(row)
            packer.num_free -= watermark
            is_added = num_tokens > 0 and packer.num_places_left > 0 and self._add(row, num_tokens)
            packer.num_free += watermark
            if not is_added or packer.remaining(row) > num_tokens:
                return

    # --- evict

    def _evict_until(self, row: int, num_tokens: int, num_whole: int, blocks_due: int) -> bool:
        """Evict requests that can wait longer, the longest first, while blocks are missing.

        Return False if even all of them would not free `num_whole` blocks.
        """
        packer = self._packer
        num_spare_blocks = packer.num_free - blocks_due
        wanted = packer.blocks_needed(row, num_tokens)
        if max(wanted, num_whole) <= num_spare_blocks:
            return True
        if not self._has_victims or not self._may_preempt[row]:
            return num_whole <= num_spare_blocks
        victims = self._victims(row)
        self._has_victims = bool(victims)  # later requests in the queue find no more victims
        if num_whole > num_spare_blocks + packer.num_freed_by(victims):
            return False
        while victims and wanted > packer.num_free - blocks_due:
            self._is_evicted[victims[-1]] = True
            packer.drop(victims.pop())
        return True

    def _victims(self, row: int) -> list[int]:
        table, packer = self._table, self._packer
        may_leave = (table.num_blocks > 0) & (table.num_preemptions < self._config.max_preemptions)
        may_leave &= ~self._is_evicted
        ordered = self._ordered(np.union1d(np.flatnonzero(may_leave), [row])).tolist()
        return [other for other in ordered[ordered.index(row) + 1 :] if other not in packer]
