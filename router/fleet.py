"""The workers and pools that are there, what each was given, and who should get what next."""

from alignedserve.core.blocks import blocks_for
from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.links import FormBatch, PoolLoad, PoolRegistered, WorkerLoad, WorkerRegistered
from router.state import PoolRecord, TrackedRequest, WorkerRecord

# Share of a decode worker's blocks that granted, not yet admitted requests may need (design, section 3: max_blocks).
_CANDIDATE_SHARE = 0.4


class Fleet:
    """Records of workers and pools by name. Keeps count of what tracked requests hold; decides nothing about them."""

    def __init__(self, *, candidate_requests: int) -> None:
        self.workers: dict[str, WorkerRecord] = {}
        self.pools: dict[str, PoolRecord] = {}
        self._candidate_requests = candidate_requests
        self._next_batch = 1
        self._num_pool_lives = 0

    # --- who is there

    def register(self, peer: str, message: WorkerRegistered | PoolRegistered) -> None:
        """A worker or pool came, or came back with nothing."""
        if isinstance(message, WorkerRegistered):
            self.workers[peer] = WorkerRecord(peer, message)
            return
        self._num_pool_lives += 1
        self.pools[peer] = PoolRecord(peer, self._num_pool_lives, message.num_blocks)

    def remove(self, peer: str) -> None:
        """A worker or pool is gone."""
        self.workers.pop(peer, None)
        if self.pools.pop(peer, None) is None:
            return
        for worker in self.workers.values():
            worker.forming = None  # what the pool was asked, it will not answer any more
        self.mark_news()

    def __contains__(self, peer: str) -> bool:
        return peer in self.workers or peer in self.pools

    def pool_of(self, worker_name: str) -> PoolRecord | None:
        """The pool on this worker's node, if both are there."""
        worker = self.workers.get(worker_name)
        return self.pools.get(worker.registered.pool_name) if worker is not None else None

    def can_ever_hold(self, max_context_len: int) -> bool:
        """Whether a request of this length fits some decode worker; True while none is there to tell."""
        decoders = [worker.registered for worker in self.workers.values() if worker.registered.can_decode]
        fits = [blocks_for(max_context_len, known.block_size) <= known.num_blocks for known in decoders]
        return any(fits) or not fits

    # --- what they report

    def note_load(self, peer: str, load: WorkerLoad | PoolLoad) -> None:
        """Latest counts of a worker or pool."""
        if isinstance(load, PoolLoad):
            if peer in self.pools:
                self.pools[peer].num_blocks_used = load.num_blocks_used
        elif peer in self.workers:
            self.workers[peer].load = load
            self.workers[peer].has_news = True

    def mark_news(self) -> None:
        """Something changed that may let a batch be formed where none could be before."""
        for worker in self.workers.values():
            worker.has_news = True

    # --- what tracked requests hold

    def note_decoding(self, tracked: TrackedRequest, worker: WorkerRecord) -> None:
        """The request is this worker's now."""
        self.forget(tracked)
        tracked.move(Stage.DECODING, worker.name)
        worker.decoding.add(tracked.request.request_id)

    def note_pooled(self, tracked: TrackedRequest, pool: str) -> None:
        """The request lies in this pool now."""
        tracked.move(Stage.POOLED, pool)
        self.pools[pool].num_pooled += 1
        self.mark_news()

    def forget(self, tracked: TrackedRequest) -> None:
        """Whoever held this request does so no more."""
        request_id: RequestId = tracked.request.request_id
        worker = self.workers.get(tracked.holder or "")
        if worker is not None:
            worker.prefilling.pop(request_id, None)
            worker.decoding.discard(request_id)
            worker.has_news = True
        if tracked.stage is Stage.POOLED and tracked.holder in self.pools:
            self.pools[tracked.holder].num_pooled -= 1

    def may_have_lost(self, tracked: TrackedRequest, peer: str) -> bool:
        """Whether this request may be lost with this peer: held by it, or on its way to it."""
        if peer in (tracked.holder, tracked.granted_to):
            return True
        worker = self.workers.get(tracked.holder or "")
        return tracked.is_computed and worker is not None and worker.registered.pool_name == peer

    # --- who should get what

    def least_loaded_prefiller(self) -> WorkerRecord | None:
        """The worker that can take a prefill now and has the fewest tokens to compute; ties go by name."""
        able = [worker for worker in self.workers.values() if self._can_prefill_now(worker)]
        return min(able, key=lambda worker: (worker.num_prefill_tokens, worker.name), default=None)

    def _can_prefill_now(self, worker: WorkerRecord) -> bool:
        """A colocated worker takes no more requests than it can run; others need a pool, and are bounded by tokens."""
        if not worker.registered.can_prefill:
            return False
        if worker.registered.can_decode:
            return len(worker.prefilling) + len(worker.decoding) < worker.registered.max_running
        return worker.registered.pool_name in self.pools

    def batches_to_form(self) -> list[tuple[str, FormBatch]]:
        """What to ask of which pool, for decode workers that will soon have room; the emptiest worker goes first."""
        asked = []
        for worker in sorted(self.workers.values(), key=lambda worker: (len(worker.decoding), worker.name)):
            pool = self.pools.get(worker.registered.pool_name)
            if pool is None or pool.num_pooled == 0 or not worker.wants_batches:
                continue
            max_requests, max_blocks = self._appetite(worker, pool)
            if max_requests > 0 and max_blocks > 0:
                worker.forming, worker.has_news = BatchId(self._next_batch), False
                self._next_batch += 1
                asked.append((pool.name, FormBatch(worker.forming, WorkerName(worker.name), max_blocks, max_requests)))
        return asked

    def _appetite(self, worker: WorkerRecord, pool: PoolRecord) -> tuple[int, int]:
        """How many more requests and blocks to grant: what fits, and a few candidates ahead of need."""
        peers = sum(
            other.registered.can_decode and other.registered.pool_name == pool.name for other in self.workers.values()
        )
        fair_share = -(-pool.num_pooled // peers)
        wanted = worker.registered.max_running + self._candidate_requests - len(worker.decoding)
        if not worker.decoding:
            return min(wanted, fair_share), worker.registered.num_blocks
        candidate_blocks = worker.load.num_candidate_blocks if worker.load is not None else 0
        return min(wanted, fair_share), int(_CANDIDATE_SHARE * worker.registered.num_blocks) - candidate_blocks
