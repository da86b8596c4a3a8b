"""Decides which pools are asked for batches, and for which of their decode workers.

Nothing is decided twice from the same facts: a pool is looked at when something has changed there (`note_change`), and
when the time is up that one of its workers or large requests had to wait.
"""

from collections.abc import Iterable, Mapping

from alignedserve.config.sections import BatchingConfig
from alignedserve.core.ids import BatchId, WorkerName
from alignedserve.messages.pools import FormBatch
from alignedserve.messages.workers import JoinedBatch, WorkerLoad
from router.ranking import Ranking
from router.state import BatchKind, PoolRecord, WorkerRecord

Nodes = Mapping[str, Mapping[str, WorkerRecord]]  # workers by name, by the pool of their node


class BatchRequests:
    """The FormBatch messages to pools. Reads the records of pools and nodes, which belong to the placement."""

    def __init__(
        self, *, pools: Mapping[str, PoolRecord], nodes: Nodes, max_candidate_requests: int, batching: BatchingConfig
    ) -> None:
        self._pools = pools
        self._nodes = nodes
        self._max_candidate_requests = max_candidate_requests
        self._batching = batching
        self._next_batch = 1
        self._changed: dict[str, None] = {}  # pools to look at
        self._waiting: Ranking[float] = Ranking()  # pools by the begin of the wait that is over next

    def note_change(self, pool: str) -> None:
        """Look at this pool, registered or not, at the next call of `to_send`."""
        self._changed[pool] = None

    def to_send(self, now: float) -> list[tuple[str, FormBatch]]:
        """Return the FormBatch messages to send, with their pools, the decode worker with the fewest requests first.

        A pool gets no FormBatch while those without an answer may take all that is pooled: most would come back empty.
        """
        self._note_waited(now)
        if not self._changed:
            return []
        pools = [self._pools[name] for name in self._changed if name in self._pools]
        self._changed.clear()
        num_requested = {pool.name: self._num_requested(pool) for pool in pools}  # by FormBatch without an answer
        workers = [worker for pool in pools if pool.num_pooled for worker in self._nodes.get(pool.name, {}).values()]
        asked = []
        for worker in sorted(workers, key=lambda worker: (len(worker.decoding), worker.name)):
            pool = self._pools[worker.registered.pool_name]
            if num_requested[pool.name] >= pool.num_pooled:
                continue
            form = self._next_form(worker, pool, now)
            if form is not None:
                num_requested[pool.name] += form.max_requests
                asked.append((pool.name, form))
        for pool in pools:
            self._wait(pool, now)
        return asked

    def close(self, worker: WorkerRecord, *, is_empty: bool, now: float) -> None:
        """Note the answer to the worker's FormBatch."""
        self.cancel(worker)
        if is_empty:
            worker.refused_kinds.add(worker.requested_kind)
            return
        worker.is_load_stale = True
        if worker.requested_kind is BatchKind.BATCH:
            worker.last_batch_s = now

    def cancel(self, worker: WorkerRecord) -> None:
        """Expect no answer to the worker's FormBatch."""
        worker.pending_batch = None
        self.note_change(worker.registered.pool_name)

    def least_share(self, pool: str) -> int:
        """Return the fewest blocks that a batch for a busy decode worker of this pool may have."""
        known = [worker for worker in self._nodes.get(pool, {}).values() if worker.registered.can_decode]
        return min((self._share(worker) for worker in known), default=0)

    # --- when to look again

    def _note_waited(self, now: float) -> None:
        while (first := self._waiting.first()) is not None and now - first.rank >= self._batching.starvation_s:
            self._waiting.discard(first.name)
            self._changed[first.name] = None

    def _wait(self, pool: PoolRecord, now: float) -> None:
        """Look at the pool again when its next worker or large request will have waited for `starvation_s`."""
        begins = [worker.last_batch_s for worker in self._nodes.get(pool.name, {}).values()]
        begins += [pooled_s for _, pooled_s in pool.large_requests.values()]
        begin = min((begin for begin in begins if now - begin < self._batching.starvation_s), default=None)
        if begin is None or not pool.num_pooled:
            self._waiting.discard(pool.name)
        else:
            self._waiting.put(pool.name, begin)

    # --- what to ask for

    def _num_requested(self, pool: PoolRecord) -> int:
        workers = self._nodes.get(pool.name, {}).values()
        return sum(worker.num_requested for worker in workers if worker.pending_batch is not None)

    def _next_form(self, worker: WorkerRecord, pool: PoolRecord, now: float) -> FormBatch | None:
        if worker.registered.can_prefill or worker.is_draining:
            return None
        if worker.pending_batch is not None or worker.is_load_stale:
            return None
        form = self._request_batch(worker, pool, now) or self._request_joining(worker, pool, now)
        if form is not None:
            worker.pending_batch, worker.num_requested = form.batch_id, form.max_requests
            worker.requested_kind = BatchKind.BATCH if form.joins is None else BatchKind.JOIN
        return form

    def _request_batch(self, worker: WorkerRecord, pool: PoolRecord, now: float) -> FormBatch | None:
        """Request the next batch; while the worker has enough to run, only one worth a switch, or after a long time."""
        load, batching = worker.load or WorkerLoad(), self._batching
        if BatchKind.BATCH in worker.refused_kinds or load.num_batch_candidates:
            return None
        min_requests = batching.enough_requests(worker.registered.max_running_requests)
        is_saturated = load.num_running >= min_requests
        is_worth_it = pool.num_pooled >= min_requests
        if is_saturated and not is_worth_it and now - worker.last_batch_s < batching.starvation_s:
            return None
        max_requests = worker.registered.max_running_requests
        if not (is_saturated and batching.is_aligned):
            max_requests += self._max_candidate_requests - len(worker.decoding)
        overdue = (size for size, pooled_s in pool.large_requests.values() if now - pooled_s >= batching.starvation_s)
        return self._form(worker, pool, max_requests, min_requests, least_blocks=_largest_that_fits(worker, overdue))

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
        peers = self._nodes[pool.name].values()
        num_peers = sum(other.registered.can_decode and not other.is_draining for other in peers)
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

    def _share(self, worker: WorkerRecord) -> int:
        return int(self._batching.max_block_share * worker.registered.num_blocks)


def _largest_that_fits(worker: WorkerRecord, sizes: Iterable[int]) -> int:
    """Return the largest of these numbers of blocks that the worker has room for at all."""
    return max((size for size in sizes if size <= worker.registered.num_blocks), default=0)
