"""A placement that keeps nothing in order: every choice looks at all workers, every event at all pools.

Slow, and short enough to see that it is right; tests compare the decisions of the router's own with these.
"""

from collections.abc import Iterator, Mapping

from typing_extensions import override

from alignedserve.config.sections import BatchingConfig
from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.core.lifecycle import Stage
from alignedserve.costmodel.links import LearnedLinks
from alignedserve.messages.pools import FormBatch, PoolLoad, PoolRegistered
from alignedserve.messages.prefixes import PrefixBlocksChanged, is_told, split_names
from alignedserve.messages.workers import JoinedBatch, WorkerLoad, WorkerRegistered
from router.batching.far_batches import FarLimits, choose_far_batches, is_spare, num_left
from router.batching.overdue_pools import (
    can_take_batch,
    has_waited,
    is_batch_awaited,
    is_idle_beside,
    lender_rank,
    limits_of,
    oldest_of,
)
from router.placement import Placement
from router.prefix_index import PrefixIndex
from router.state import BatchKind, DispatchedPrefill, PooledRecord, PoolRecord, TrackedRequest, WorkerRecord


class PlainPlacement(Placement):
    """See Placement, of which it uses nothing that concerns a choice."""

    def __init__(self, *, max_candidate_requests: int, batching: BatchingConfig) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.pools: dict[str, PoolRecord] = {}
        self._cached: dict[str, set[bytes]] = {}  # names of blocks, by worker or pool
        self._max_candidate_requests = max_candidate_requests
        self._batching = batching
        self._next_batch = 1
        self._num_pool_epochs = 0
        self.prefixes = PrefixIndex()  # of pools of other nodes, of which there are none
        self.links = LearnedLinks()

    # --- registration

    @override
    def register(self, peer: str, message: WorkerRegistered | PoolRegistered) -> str | None:
        """Add a worker or pool that (re)connected, holding nothing; return why it is refused, or None."""
        self.remove(peer)
        others = {known.registered.layout_digest for known in self.workers.values()}
        others |= {known.layout_digest for known in self.pools.values()}
        if others and message.layout_digest not in others:
            return "its blocks are not of the size, dtype and shape of the cluster's; start all with one configuration"
        if isinstance(message, WorkerRegistered):
            self.workers[peer] = WorkerRecord(peer, message)
            return None
        self._num_pool_epochs += 1
        self.pools[peer] = PoolRecord(peer, self._num_pool_epochs, message.num_blocks, message.layout_digest)
        return None

    @override
    def remove(self, peer: str) -> None:
        """Remove a worker or pool."""
        self.links.forget(peer)
        self._cached.pop(peer, None)
        self.workers.pop(peer, None)
        if self.pools.pop(peer, None) is None:
            return
        for worker in self.workers.values():
            if worker.asked_pool == peer:
                worker.pending_batch = None  # the pool will never answer it
        self.clear_refusals()

    @override
    def free_by_distance(self, worker: WorkerRecord) -> Iterator[Iterator[WorkerRecord]]:
        """See Placement. Full ones are among them: the bypass passes them over."""
        pool = worker.registered.pool_name
        yield (other for other in self.workers.values() if other.registered.pool_name == pool)
        yield (other for other in self.workers.values() if other.registered.pool_name != pool)

    @override
    def can_ever_hold(self, max_context_len: int) -> bool:
        """Return True if a request of this length fits some decode worker, or while no decode worker is registered."""
        decoders = [worker.registered for worker in self.workers.values() if worker.registered.can_decode]
        fits = [blocks_for(max_context_len, known.block_size) <= known.num_blocks for known in decoders]
        return any(fits) or not fits

    # --- reports

    @override
    def update_load(self, peer: str, load: WorkerLoad | PoolLoad) -> None:
        """Take the latest counts of a worker or pool."""
        if isinstance(load, PoolLoad):
            if peer in self.pools:
                self.pools[peer].num_blocks_used = load.num_blocks_used
                self.pools[peer].num_blocks_kept = load.num_blocks_kept
                self.pools[peer].num_reserved = load.num_reserved
                self.pools[peer].lengths = load.lengths
        elif peer in self.workers:
            worker = self.workers[peer]
            worker.load, worker.is_load_stale = load, False
            worker.refused_kinds.clear()
            worker.refusing_pools.clear()

    @override
    def clear_refusals(self) -> None:
        """Allow every FormBatch again: something has changed that may let a batch be formed."""
        for worker in self.workers.values():
            worker.refused_kinds.clear()
            worker.refusing_pools.clear()

    @override
    def start_prefill(self, worker: WorkerRecord, request_id: RequestId, prefill: DispatchedPrefill) -> None:
        """See Placement."""
        worker.start_prefill(request_id, prefill)

    @override
    def complete_prefill(self, worker: WorkerRecord, request_id: RequestId, attempt: int) -> bool:
        """See Placement."""
        return worker.complete_prefill(request_id, attempt) is not None

    @override
    def update_prefixes(self, peer: str, changed: PrefixBlocksChanged) -> None:
        """See Placement."""
        if peer in self:
            before = set() if changed.is_complete else self._cached.get(peer, set())
            self._cached[peer] = (before - set(changed.removed)) | set(changed.stored)

    @override
    def prefix_runs(self, tracked: TrackedRequest) -> dict[str, int]:
        """See Placement."""
        names, runs = list(split_names(tracked.block_names)), {}
        for name in (*self.workers, *self.pools):
            prefilling = self.workers[name].prefilling.values() if name in self.workers else ()
            given = [list(split_names(one.block_names)) for one in prefilling if one.block_names]
            runs[name] = _run_of(names, self._cached.get(name, set()), given)
        return {name: run for name, run in runs.items() if run}

    @override
    def prefix_holders(self, runs: Mapping[str, int], least: int) -> Iterator[WorkerRecord]:
        """See Placement."""
        for worker in self.workers.values():
            if max(runs.get(worker.name, 0), runs.get(worker.registered.pool_name, 0)) > least:
                yield worker

    @override
    def cancel_batch_request(self, worker: WorkerRecord) -> None:
        """See Placement."""
        worker.pending_batch = None

    # --- owners of requests

    @override
    def set_decoding(self, tracked: TrackedRequest, worker: WorkerRecord) -> None:
        """Make this worker the holder of the request."""
        self.unassign(tracked)
        tracked.move(Stage.DECODING, worker.name)
        worker.decoding.add(tracked.request.request_id)

    @override
    def set_pooled(self, tracked: TrackedRequest, pool: str, num_blocks: int) -> None:
        """Make this pool the holder of the request, which comes from a prefill worker or back from a decode worker."""
        if tracked.stage is not Stage.PREFILLING:  # a prefill is counted until its worker reports it completed
            self.unassign(tracked)
        tracked.move(Stage.POOLED, pool)
        self.set_copy(tracked, pool)
        self.pools[pool].pooled[tracked.request.request_id] = PooledRecord(num_blocks, tracked.pooled_s)
        if num_blocks > self._least_share(pool):
            self.pools[pool].large_requests[tracked.request.request_id] = (num_blocks, tracked.pooled_s)
        self.clear_refusals()

    def _least_share(self, pool: str) -> int:
        """Return the fewest blocks that a batch for a busy decode worker of this pool may have."""
        known = [worker for worker in self.workers.values() if worker.registered.can_decode]
        return min((self._share(worker) for worker in known if worker.registered.pool_name == pool), default=0)

    def _share(self, worker: WorkerRecord) -> int:
        return int(self._batching.max_block_share * worker.registered.num_blocks)

    @override
    def unassign(self, tracked: TrackedRequest) -> None:
        """Remove the request from the records of its holder."""
        request_id: RequestId = tracked.request.request_id
        worker = self.workers.get(tracked.holder or "")
        if worker is not None:
            worker.end_prefill(request_id)
            worker.decoding.discard(request_id)
            worker.refused_kinds.clear()
            worker.refusing_pools.clear()
        if tracked.stage is Stage.POOLED and tracked.holder in self.pools:
            self.pools[tracked.holder].pooled.pop(request_id, None)
            self.pools[tracked.holder].large_requests.pop(request_id, None)

    @property
    @override
    def num_pooled(self) -> int:
        """Number of requests waiting for a batch."""
        return sum(pool.num_pooled for pool in self.pools.values())

    # --- choices

    @override
    def note_late_prompts(self, now: float) -> None:
        """See Placement."""
        for worker in self.workers.values():
            for request_id, prefill in worker.prefilling.items():
                if worker.registered.can_move and prefill.is_real_time and prefill.due_s <= now:
                    worker.note_late(request_id, prefill.attempt)

    @override
    def least_loaded_prefiller(self, *, is_real_time: bool = False, at_full_pool: bool = False) -> WorkerRecord | None:
        """See Placement."""
        able = [worker for worker in self.workers.values() if self._can_prefill_now(worker)]
        able = [worker for worker in able if self._is_pool_full(worker) == at_full_pool]
        return min(able, key=lambda one: _rank_of(one, is_real_time), default=None)

    @override
    def near_prefiller(self, node: str, least: WorkerRecord, *, is_real_time: bool = False) -> WorkerRecord | None:
        """See Placement."""
        able = [one for one in self.workers.values() if one.registered.node == node and self._can_prefill_now(one)]
        able = [one for one in able if self._is_pool_full(one) == self._is_pool_full(least)]
        near = min(able, key=lambda one: _rank_of(one, is_real_time), default=None)
        if not node or near is None or near is least:
            return near if node else None
        more_tokens = near.num_prefill_tokens - least.num_prefill_tokens
        return near if more_tokens <= 256 and self.load_of(near) <= 1.125 * self.load_of(least) + 1 else None

    def load_of(self, worker: WorkerRecord) -> float:
        """Return its requests; those of a prefill worker's node for each decode worker there."""
        if worker.registered.can_decode:
            return len(worker.prefilling) + len(worker.decoding)
        pool = worker.registered.pool_name
        beside = [one for one in self.workers.values() if one.registered.pool_name == pool]
        num_pooled = self.pools[pool].num_pooled if pool in self.pools else 0
        num_requests = num_pooled + sum(len(one.prefilling) + len(one.decoding) for one in beside)
        return num_requests / max(1, sum(one.registered.can_decode for one in beside))

    @override
    def _can_prefill_now(self, worker: WorkerRecord) -> bool:
        """Return True if the worker has a slot (colocated workers), or a pool (others, which are bounded by tokens)."""
        if not worker.registered.can_prefill:
            return False
        if worker.registered.can_decode:
            return len(worker.prefilling) + len(worker.decoding) < worker.registered.max_running_requests
        return worker.registered.pool_name in self.pools

    @override
    def batches_to_form(self, now: float) -> list[tuple[str, FormBatch]]:
        """Return the FormBatch messages to send, with their pools, the decode worker with the fewest requests first.

        A pool gets no FormBatch while those without an answer may take all that is pooled: most would come back empty.
        """
        asked: list[tuple[str, FormBatch]] = []
        num_requested = dict.fromkeys(self.pools, 0)  # by FormBatch messages without an answer
        for worker in self.workers.values():
            if worker.pending_batch is not None:
                num_requested[worker.asked_pool] += worker.num_requested
        asked += self._overdue_batches(num_requested, now)
        for worker in sorted(self.workers.values(), key=lambda worker: (len(worker.decoding), worker.name)):
            pool = self.pools.get(worker.registered.pool_name)
            if pool is None or pool.num_pooled == 0 or worker.registered.can_prefill:
                continue
            if worker.pending_batch is not None or worker.is_load_stale or num_requested[pool.name] >= pool.num_pooled:
                continue
            form = self._request_batch(worker, pool, now) or self._request_joining(worker, pool, now)
            if form is not None:
                worker.pending_batch, worker.num_requested = form.batch_id, form.max_requests
                worker.requested_kind = BatchKind.BATCH if form.joins is None else BatchKind.JOIN
                worker.asked_pool = pool.name
                num_requested[pool.name] += form.max_requests
                asked.append((pool.name, form))
        return asked + self._far_batches(num_requested)

    def _overdue_batches(self, num_requested: dict[str, int], now: float) -> list[tuple[str, FormBatch]]:
        """Ask pools that have waited too long, the longest first, for the worker whose own has waited least."""
        asked = []
        waiting = [pool for pool in self.pools.values() if pool.num_pooled > num_requested[pool.name]]
        for pool in sorted(waiting, key=lambda pool: (pool.oldest_s, pool.name)):
            if is_batch_awaited(pool.name, self.workers.values()):
                continue
            near = [worker for worker in self.workers.values() if worker.registered.pool_name == pool.name]
            if any(is_idle_beside(pool, worker) for worker in near):
                continue
            able = []
            for worker in filter(can_take_batch, self.workers.values()):
                own = self.pools.get(worker.registered.pool_name)
                limits = limits_of(worker, pool, self._max_candidate_requests, self._batching)
                if limits is not None and has_waited(pool, oldest_of(own), now, self._batching.starvation_s):
                    able.append((*lender_rank(worker, own), worker.name, limits))
            if able:
                *_, name, limits = min(able)
                asked.append(self._far_form(self.workers[name], pool, limits))
                num_requested[pool.name] += limits.max_requests
        return asked

    def _far_form(self, worker: WorkerRecord, pool: PoolRecord, limits: FarLimits) -> tuple[str, FormBatch]:
        batch_id, self._next_batch = BatchId(self._next_batch), self._next_batch + 1
        worker.pending_batch, worker.num_requested, worker.asked_pool = batch_id, limits.max_requests, pool.name
        worker.requested_kind = BatchKind.BATCH
        return pool.name, FormBatch(batch_id, WorkerName(worker.name), **limits._asdict())

    def _far_batches(self, num_requested: dict[str, int]) -> list[tuple[str, FormBatch]]:
        left = {}
        for name, pool in self.pools.items():
            near = [worker for worker in self.workers.values() if worker.registered.pool_name == name]
            left[name] = num_left(pool, near, num_requested[name])
        spare = [one for one in self.workers.values() if is_spare(one, self.pools.get(one.registered.pool_name))]
        spare.sort(key=lambda worker: (len(worker.decoding), worker.name))
        left = {name: count for name, count in left.items() if count > 0}
        chosen = choose_far_batches(spare, len(spare), left, self.pools, self.links, self._batching) if left else []
        return [self._far_form(*batch) for batch in chosen]

    @override
    def close_batch_request(self, worker: WorkerRecord, *, is_empty: bool, now: float) -> None:
        """Note the answer to the worker's FormBatch."""
        worker.pending_batch = None
        if is_empty and worker.asked_pool != worker.registered.pool_name:
            worker.refusing_pools.add(worker.asked_pool)
            return
        if is_empty:
            worker.refused_kinds.add(worker.requested_kind)
            return
        worker.is_load_stale = True
        if worker.requested_kind is BatchKind.BATCH:
            worker.last_batch_s = now

    def _request_batch(self, worker: WorkerRecord, pool: PoolRecord, now: float) -> FormBatch | None:
        """Request the next batch; while the worker has enough to run, only one worth a switch, or after a long time."""
        load, batching = worker.load or WorkerLoad(), self._batching
        if BatchKind.BATCH in worker.refused_kinds or load.num_batch_candidates:
            return None
        is_saturated = load.num_running >= self._min_requests(worker)
        is_worth_it = pool.num_pooled >= self._min_requests(worker)
        if is_saturated and not is_worth_it and now - worker.last_batch_s < batching.starvation_s:
            return None
        max_requests = worker.registered.max_running_requests
        if not (is_saturated and batching.is_aligned):
            max_requests += self._max_candidate_requests - len(worker.decoding)
        return self._form(
            worker,
            pool,
            max_requests,
            self._min_requests(worker),
            least_blocks=_largest_overdue(pool, worker, now - batching.starvation_s),
        )

    def _request_joining(self, worker: WorkerRecord, pool: PoolRecord, now: float) -> FormBatch | None:
        """Request more of the running lengths, a few ahead of need, unless another batch has waited too long."""
        load = worker.load
        if load is None or load.running is None or BatchKind.JOIN in worker.refused_kinds:
            return None
        if load.num_batch_candidates and now - worker.last_batch_s >= self._batching.starvation_s:
            return None
        num_places = worker.registered.max_running_requests - load.num_running
        max_requests = num_places + self._max_candidate_requests - load.num_candidate_requests
        return self._form(worker, pool, max_requests, 1, joins=load.running)

    def _min_requests(self, worker: WorkerRecord) -> int:
        return self._batching.enough_requests(worker.registered.max_running_requests)

    def _form(
        self,
        worker: WorkerRecord,
        pool: PoolRecord,
        max_requests: int,
        min_requests: int,
        *,
        joins: JoinedBatch | None = None,
        least_blocks: int = 0,
    ) -> FormBatch | None:
        num_peers = sum(
            other.registered.can_decode and other.registered.pool_name == pool.name for other in self.workers.values()
        )
        max_requests = min(max_requests, -(-pool.num_pooled // num_peers))  # a fair share
        max_blocks = worker.registered.num_blocks
        if worker.decoding:
            candidate_blocks = worker.load.num_candidate_blocks if worker.load is not None else 0
            max_blocks = max(self._share(worker) - candidate_blocks, least_blocks)
        if max_requests < 1 or max_blocks < 1:
            return None
        batch_id, self._next_batch = BatchId(self._next_batch), self._next_batch + 1
        name = WorkerName(worker.name)
        return FormBatch(batch_id, name, max_blocks, max_requests, min(min_requests, max_requests), joins)


def _run_of(names: list[bytes], cached: set[bytes], given: list[list[bytes]]) -> int:
    """Return how many of these blocks a worker has cached or is about to compute, as far as the router is told."""
    told = [place for place, block in enumerate(names) if is_told(block)]
    held = [place for place in told if all(names[other] in cached for other in told if other <= place)]
    reach = told[len(held)] if len(held) < len(told) else len(names)  # nothing before it is known not to be there
    ends = 0
    for first in range(len(names)):
        for expected in given:
            if expected[0] == names[first] and first <= max(reach, ends):
                same = [one == other for one, other in zip(names[first:], expected, strict=False)]
                ends = max(ends, first + (same.index(False) if False in same else len(same)))
    return max(ends, held[-1] + 1 if held else 0)


def _largest_overdue(pool: PoolRecord, worker: WorkerRecord, pooled_before_s: float) -> int:
    """Return the blocks of the largest overdue request among those too large for the batch of a busy worker."""
    sizes = [num_blocks for num_blocks, pooled_s in pool.large_requests.values() if pooled_s <= pooled_before_s]
    return max((size for size in sizes if size <= worker.registered.num_blocks), default=0)


def _rank_of(worker: WorkerRecord, is_real_time: bool) -> tuple[float, int, str]:
    is_real_time = is_real_time and worker.registered.can_move
    return (worker.wait_s(is_real_time=is_real_time), len(worker.decoding), worker.name)
