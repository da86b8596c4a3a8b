"""Load balancing: the registered workers and pools, what each holds, and which gets what next.

No decision looks at all workers. Every change of a worker goes through a method here, which brings its place in the
orders up to date: workers that can prefill by load, those with a free slot, those that a pool had no batch for. What
concerns a pool looks at the workers of its node.
"""

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from alignedserve.config.sections import BatchingConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.costmodel.hardware import LearnedLinks
from alignedserve.messages.pools import FormBatch, PoolLoad, PoolRegistered
from alignedserve.messages.prefixes import PrefixBlocksChanged
from alignedserve.messages.workers import WorkerLoad, WorkerRegistered
from router.batch_requests import BatchRequests
from router.prefix_index import AdapterIndex, PrefixIndex
from router.state import DispatchedPrefill, PooledRecord, PoolRecord, TrackedRequest, WorkerRecord
from router.worker_orders import LongestContexts, Prefillers, Standbys, is_as_free, requests_at


class Placement:
    """Records of workers and pools by name, to be read, and the choice of a worker for prefills and batches."""

    def __init__(self, *, max_candidate_requests: int, batching: BatchingConfig) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.pools: dict[str, PoolRecord] = {}
        self.packs = batching.pack_share is not None  # requests of any length into the slack of what runs
        self.num_pooled = 0
        self._num_pool_epochs = 0
        self._num_registrations = 0  # of workers
        self._nodes: dict[str, dict[str, WorkerRecord]] = {}  # workers by the pool of their node
        self._prefillers = {  # by whether their pool has no room for what they have computed, then for which class
            at_full_pool: {is_real_time: Prefillers(is_real_time=is_real_time) for is_real_time in (False, True)}
            for at_full_pool in (False, True)
        }
        self._due_prompts: list[tuple[float, RequestId, int, str]] = []  # heap of prompts at workers: due, attempt
        self.longest_contexts = LongestContexts()
        self._free: dict[str, WorkerRecord] = {}  # decode workers with a slot for chat
        self.prefixes = PrefixIndex()
        self.adapters = AdapterIndex()
        self.links = LearnedLinks()  # to decode workers from pools of other nodes
        self._standbys = Standbys(self._nodes, self._rank)
        self._refused: dict[str, WorkerRecord] = {}  # perhaps more than have `refused_kinds`
        self.batch_requests = BatchRequests(
            pools=self.pools,
            nodes=self._nodes,
            links=self.links,
            max_candidate_requests=max_candidate_requests,
            batching=batching,
        )

    def register(self, peer: str, message: WorkerRegistered | PoolRegistered) -> str | None:
        """Add a worker or pool that (re)connected, holding nothing; return why it is refused, or None."""
        self.remove(peer)
        of_workers = (worker.registered.layout_digest for worker in self.workers.values())
        known = next(of_workers, next((pool.layout_digest for pool in self.pools.values()), None))
        if known is not None and known != message.layout_digest:
            return "its blocks are not of the size, dtype and shape of the cluster's; start all with one configuration"
        if isinstance(message, WorkerRegistered):
            self._num_registrations += 1
            registered = msgspec.structs.replace(message, decoding=())
            record = WorkerRecord(peer, registered, registration=self._num_registrations)
            self._standbys.add(record, is_decoding=bool(message.decoding))
            self._add_worker(record)
            self._standbys.settle(registered.pool_name)
            return None
        self._num_pool_epochs += 1
        self.pools[peer] = PoolRecord(peer, self._num_pool_epochs, message.num_blocks, message.layout_digest)
        self._rank_node(peer)
        return None

    def _add_worker(self, worker: WorkerRecord) -> None:
        registered = worker.registered
        self.workers[worker.name] = worker
        self._nodes.setdefault(registered.pool_name, {})[worker.name] = worker
        self.longest_contexts.add(worker)
        self._rank(worker)

    def remove(self, peer: str) -> None:
        self.links.forget(peer)
        if (worker := self.workers.pop(peer, None)) is not None:
            self._remove_worker(worker)
        if (pool := self.pools.pop(peer, None)) is None:
            return
        self.prefixes.forget(peer)
        self.num_pooled -= pool.num_pooled
        self.batch_requests.pool_lost(peer)
        self._rank_node(peer)
        self.clear_refusals()

    def _remove_worker(self, worker: WorkerRecord) -> None:
        name, pool = worker.name, worker.registered.pool_name
        for prefill in worker.prefilling.values():
            self.prefixes.settle(name, prefill.block_names)
        self.prefixes.forget(name)
        self.adapters.forget(name)
        del self._nodes[pool][name]
        if not self._nodes[pool]:
            del self._nodes[pool]
        self._rank_among_prefillers(worker, can_prefill=False)
        self.longest_contexts.discard(name)
        for records in (self._free, self._refused):
            records.pop(name, None)
        self.batch_requests.worker_lost(worker)
        self._standbys.settle(pool)

    def __contains__(self, peer: str) -> bool:
        return peer in self.workers or peer in self.pools

    def pool_of(self, worker_name: str) -> PoolRecord | None:
        worker = self.workers.get(worker_name)
        return self.pools.get(worker.registered.pool_name) if worker is not None else None

    def free_by_distance(self, worker: WorkerRecord) -> Iterator[Iterator[WorkerRecord]]:
        """Yield the decode workers with a slot for chat: those of its node, then those that need the network."""
        pool = worker.registered.pool_name
        yield (other for other in self._nodes[pool].values() if other.has_real_time_slot)
        yield (other for other in self._free.values() if other.registered.pool_name != pool)

    def set_draining(self, names: Collection[str]) -> None:
        self._standbys.set_draining(names, self.workers)

    def is_leaving(self, tracked: TrackedRequest, moved: Collection[str]) -> bool:
        """Return whether the request has to go elsewhere: it depends on a named peer, or its pool drains."""
        if any(self.depends_on(tracked, name) for name in moved):
            return True
        if tracked.stage is Stage.POOLED:
            return self._standbys.is_draining(tracked.holder) and tracked.destination is None
        pool = self.pool_of(tracked.holder or "") if tracked.stage is Stage.PREFILLING else None
        return pool is not None and self._standbys.is_draining(pool.name) and tracked.destination is None

    def update_load(self, peer: str, load: WorkerLoad | PoolLoad) -> None:
        if isinstance(load, PoolLoad):
            if peer in self.pools:
                self._update_pool(self.pools[peer], load)
        elif (worker := self.workers.get(peer)) is not None:
            worker.load, worker.is_load_stale = load, False
            self._clear_refusal(worker)

    def _update_pool(self, pool: PoolRecord, load: PoolLoad) -> None:
        pool.num_blocks_used, pool.num_blocks_kept = load.num_blocks_used, load.num_blocks_kept
        pool.lengths = load.lengths
        was_full, pool.num_reserved = bool(pool.num_reserved), load.num_reserved
        if was_full != bool(pool.num_reserved):
            self._rank_node(pool.name)

    def clear_refusals(self) -> None:
        for worker in list(self._refused.values()):
            self._clear_refusal(worker)

    def _clear_refusal(self, worker: WorkerRecord) -> None:
        worker.refused_kinds.clear()
        worker.refusing_pools.clear()
        self._refused.pop(worker.name, None)
        self._rank(worker)

    def start_prefill(self, worker: WorkerRecord, request_id: RequestId, prefill: DispatchedPrefill) -> None:
        self._end_prefill(worker, request_id)
        worker.start_prefill(request_id, prefill)
        self.prefixes.expect(worker.name, prefill.block_names)
        if prefill.adapter:
            self.adapters.use(worker, prefill.adapter)
        if prefill.is_real_time and prefill.due_s < math.inf:
            heapq.heappush(self._due_prompts, (prefill.due_s, request_id, prefill.attempt, worker.name))
        self._rank(worker)

    def note_late_prompts(self, now: float) -> None:
        while self._due_prompts and self._due_prompts[0][0] <= now:  # also of prompts that have ended
            _, request_id, attempt, name = heapq.heappop(self._due_prompts)
            worker = self.workers.get(name)
            if worker is not None:
                worker.note_late(request_id, attempt)
                self._rank(worker)

    def complete_prefill(self, worker: WorkerRecord, request_id: RequestId, attempt: int) -> bool:
        completed = worker.complete_prefill(request_id, attempt)
        if completed is not None:
            self.prefixes.settle(worker.name, completed.block_names)
        self._rank(worker)
        return completed is not None

    def _end_prefill(self, worker: WorkerRecord, request_id: RequestId) -> None:
        ended = worker.end_prefill(request_id)
        if ended is not None:
            self.prefixes.settle(worker.name, ended.block_names)

    def update_prefixes(self, peer: str, changed: PrefixBlocksChanged) -> None:
        if peer in self or self.prefixes.has_pool(peer):
            self.prefixes.update(peer, changed)

    def prefix_runs(self, tracked: TrackedRequest) -> dict[str, int]:
        return self.prefixes.runs(tracked.block_names) if tracked.block_names else {}

    def prefix_holders(self, runs: Mapping[str, int], least: int) -> Iterator[WorkerRecord]:
        for name, run in runs.items():
            if run > least:
                worker = self.workers.get(name)
                yield from self._nodes.get(name, {}).values() if worker is None else (worker,)

    # --- owners of requests

    def set_destination(self, tracked: TrackedRequest, worker: WorkerRecord | None) -> None:
        """Note the decode worker that a prompt's cache goes straight to; None: to the pool, or it is there."""
        if (former := self.workers.get(tracked.destination or "")) is not None:
            former.coming.discard(tracked.request.request_id)
        tracked.destination = worker.name if worker is not None else None
        if worker is not None:
            worker.coming.add(tracked.request.request_id)

    def set_decoding(self, tracked: TrackedRequest, worker: WorkerRecord) -> None:
        self.unassign(tracked)
        tracked.move(Stage.DECODING, worker.name)
        worker.decoding.add(tracked.request.request_id)
        if tracked.is_real_time:
            worker.decoding_real_time.add(tracked.request.request_id)
        self._rank(worker)

    def set_pooled(self, tracked: TrackedRequest, pool: str, num_blocks: int) -> None:
        if tracked.stage is not Stage.PREFILLING:  # a prefill is counted until its worker reports it completed
            self.unassign(tracked)
        else:
            self.set_destination(tracked, None)
        tracked.move(Stage.POOLED, pool)
        self.set_copy(tracked, pool)
        record = PooledRecord(num_blocks, tracked.pooled_s, tracked.is_real_time, tracked.next_late_s)
        self.pools[pool].add_pooled(tracked.request.request_id, record)
        self.num_pooled += 1
        if num_blocks > self.batch_requests.least_share(pool):
            self.pools[pool].large_requests[tracked.request.request_id] = (num_blocks, tracked.pooled_s)
        self.batch_requests.note_change(pool)
        self.clear_refusals()

    def set_copy(self, tracked: TrackedRequest, pool: str) -> None:
        tracked.copy_at = (pool, self.pools[pool].epoch)

    def copy_of(self, tracked: TrackedRequest) -> str | None:
        if tracked.copy_at is None:
            return None
        pool = self.pools.get(tracked.copy_at[0])
        return pool.name if pool is not None and pool.epoch == tracked.copy_at[1] else None

    def unassign(self, tracked: TrackedRequest) -> None:
        request_id: RequestId = tracked.request.request_id
        self.set_destination(tracked, None)
        worker = self.workers.get(tracked.holder or "")
        if worker is not None:
            self._end_prefill(worker, request_id)
            worker.decoding.discard(request_id)
            worker.decoding_real_time.discard(request_id)
            self._clear_refusal(worker)
        if tracked.stage is Stage.POOLED and tracked.holder in self.pools:
            pool = self.pools[tracked.holder]
            self.num_pooled -= pool.remove_pooled(request_id)
            self.batch_requests.note_change(pool.name)

    def depends_on(self, tracked: TrackedRequest, peer: str) -> bool:
        """Return True if the request may be lost with this peer: held by it, or on its way to it."""
        if peer in (tracked.holder, tracked.destination):
            return True
        worker = self.workers.get(tracked.holder or "")
        return tracked.is_prefilled and worker is not None and worker.registered.pool_name == peer

    def least_loaded_prefiller(self, *, is_real_time: bool = False, at_full_pool: bool = False) -> WorkerRecord | None:
        """Return the worker with the least wait (worker_orders.py) that can take a prefill now.

        `is_real_time`: of a prompt that goes before best-effort ones. `at_full_pool`: of the workers whose pool has no
        room for what they have computed, as reported last; else of the rest.
        """
        name = self._prefillers[at_full_pool][is_real_time].least_loaded()
        return self.workers[name] if name is not None else None

    def near_prefiller(self, node: str, least: WorkerRecord, *, is_real_time: bool = False) -> WorkerRecord | None:
        """Return the least loaded prefiller of this node if it is about as free as `least` (worker_orders.py)."""
        name = self._prefillers[self._is_pool_full(least)][is_real_time].least_loaded_of(node)
        near = self.workers.get(name or "")
        if near is None or near is least:
            return near
        near_tokens, tokens = (worker.num_tokens_before(is_real_time=is_real_time) for worker in (near, least))
        near_requests, requests = (requests_at(worker, self.beside(worker), self.pools) for worker in (near, least))
        return near if is_as_free(near_tokens, near_requests, tokens, requests) else None

    def beside(self, worker: WorkerRecord) -> Collection[WorkerRecord]:
        return self._nodes[worker.registered.pool_name].values()

    def can_prefill_now(self, worker: WorkerRecord) -> bool:
        return self._can_prefill_now(worker) and not self._is_pool_full(worker)

    def _can_prefill_now(self, worker: WorkerRecord) -> bool:
        if not worker.registered.can_prefill or worker.is_draining:
            return False
        if worker.registered.can_decode:
            return worker.num_held < worker.registered.max_running_requests
        return worker.registered.pool_name in self.pools

    def _is_pool_full(self, worker: WorkerRecord) -> bool:
        pool = self.pools.get(worker.registered.pool_name)
        return pool is not None and pool.num_reserved > 0 and not worker.registered.can_decode

    def batches_to_form(
        self, now: float, is_shared: Callable[[float], bool] = lambda _: False
    ) -> list[tuple[str, FormBatch]]:
        return self.batch_requests.to_send(now, is_shared)

    def close_batch_request(self, worker: WorkerRecord, *, is_empty: bool, now: float) -> None:
        self.batch_requests.close(worker, is_empty=is_empty, now=now)
        if is_empty:
            self._refused[worker.name] = worker

    # --- the orders of workers

    def _rank_among_prefillers(self, worker: WorkerRecord, *, can_prefill: bool) -> None:
        is_full = self._is_pool_full(worker)
        for at_full_pool, by_class in self._prefillers.items():
            for prefillers in by_class.values():
                if can_prefill and at_full_pool == is_full:
                    prefillers.put(worker)
                else:
                    prefillers.discard(worker)

    def _rank_node(self, pool: str) -> None:
        for worker in self._nodes.get(pool, {}).values():
            self._rank(worker)
        self.batch_requests.note_change(pool)

    def _rank(self, worker: WorkerRecord) -> None:
        name, registered = worker.name, worker.registered
        self._rank_among_prefillers(worker, can_prefill=self._can_prefill_now(worker))
        if worker.has_real_time_slot:
            self._free[name] = worker
        else:
            self._free.pop(name, None)
        if not registered.can_prefill:  # such a worker takes no batch
            self.batch_requests.note_change(registered.pool_name)
