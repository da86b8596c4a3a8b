"""Batches of another node's pool for a decode worker: while its own pool is empty, or when that pool has waited too
long.

A decode worker takes batches of its own node's pool, and while it has nothing, of others what is left there. A pool
without workers beside it, or with workers too small or too slow for its requests, would wait for as long as the others
are never empty. So ages count: once the oldest request of a pool has waited for `starvation_s`, and for as much longer
than all requests in the pool of a worker elsewhere, the next batch of that worker is this pool's, with room for that
request. The pool that has waited longest is served first, by the worker whose own pool has waited least; a pool gets
one such batch at a time. An idle worker beside the pool goes first: it needs no link to another node.

The bound: when a worker's own pool is asked for a batch, the oldest request of any other pool that could have been
asked has waited for less than `starvation_s` longer than its oldest, or a batch of it is on its way. Within a pool its
batch former bounds the wait.

Example, with `starvation_s=2`: pool-0 has no decode worker, and its oldest request came at 10 s. decode-1 has always
something to do of its own pool-1, whose oldest came at 11 s, and keeps to pool-1. When the requests that came to pool-1
before 12 s are gone, at 13 s or later, the next batch of decode-1 is pool-0's.
"""

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import closing
from typing import NamedTuple

from alignedserve.config.sections import BatchingConfig
from alignedserve.costmodel.hardware import LearnedLinks
from alignedserve.messages.workers import WorkerLoad
from router.state import BatchKind, PoolRecord, Ranking, WorkerRecord


class FarLimits(NamedTuple):
    """See FormBatch."""

    max_blocks: int
    max_requests: int
    min_requests: int


class FarBatch(NamedTuple):
    """A batch to ask a pool of another node for."""

    worker: WorkerRecord
    pool: PoolRecord
    limits: FarLimits


def is_spare(worker: WorkerRecord, own_pool: PoolRecord | None) -> bool:
    has_more = worker.load is not None and worker.load.num_batch_candidates > 0
    return (
        worker.has_free_slot
        and not worker.awaits_batch
        and not has_more
        and (own_pool is None or own_pool.num_pooled == 0)
    )


def num_left(pool: PoolRecord, near: Iterable[WorkerRecord], num_requested: int) -> int:
    """Return how many of its requests no worker of its node takes now; 0 while such a worker may get a batch."""
    num = pool.num_pooled - num_requested
    return 0 if num <= 0 or any(worker.awaits_batch for worker in near) else num


def choose_far_batches(
    spare: Iterable[WorkerRecord],
    num_spare: int,
    left: Mapping[str, int],
    pools: Mapping[str, PoolRecord],
    links: LearnedLinks,
    batching: BatchingConfig,
) -> list[FarBatch]:
    """Share what is left in pools out over spare workers, each asked at most once.

    `spare`: with the fewest requests first, `num_spare` of them; only as many are looked at as get something. `left`:
    requests by pool, at least one in each.
    """
    left = dict(left)
    chosen: list[FarBatch] = []
    for num_done, worker in enumerate(spare):
        able = [name for name in left if name not in worker.refusing_pools and name != worker.registered.pool_name]
        if not able:
            continue
        name = min(able, key=lambda name: (links.seconds_per_block(worker.name, name), -left[name], name))
        fair = -(-left[name] // (num_spare - num_done))
        limits = _limits_of(worker, fair, batching)
        if limits is not None:
            chosen.append(FarBatch(worker, pools[name], limits))
            left[name] -= limits.max_requests
            if not left[name]:
                del left[name]
        if not left:
            break
    return chosen


def _limits_of(worker: WorkerRecord, fair: int, batching: BatchingConfig) -> FarLimits | None:
    registered = worker.registered
    max_requests = min(registered.max_running_requests - len(worker.decoding), fair)
    max_blocks = registered.num_blocks
    if worker.decoding:
        load = worker.load or WorkerLoad()
        max_blocks = int(batching.max_block_share * registered.num_blocks) - load.num_candidate_blocks
    if max_requests < 1 or max_blocks < 1:
        return None
    min_requests = min(batching.enough_requests(registered.max_running_requests), max_requests)
    return FarLimits(max_blocks, max_requests, min_requests)


Nodes = Mapping[str, Mapping[str, WorkerRecord]]  # workers by name, by the pool of their node

# Workers serve pools of other nodes in this order: by when the oldest in their own pool came, the latest first (so that
# it is negated), then by the number of their requests.
LenderRank = tuple[float, int]


class OverduePools:
    """The overdue pools and the workers that may serve them, in order.

    While no pool is overdue, which is the rule, the workers are not looked at, and a change costs next to nothing.
    """

    def __init__(
        self,
        *,
        pools: Mapping[str, PoolRecord],
        nodes: Nodes,
        is_served: Callable[[PoolRecord], bool],
        max_candidate_requests: int,
        batching: BatchingConfig,
    ) -> None:
        """`is_served`: whether a batch of this pool, or all that it has, has been asked for."""
        self._pools = pools
        self._is_served = is_served
        self._nodes = nodes
        self._max_candidate_requests = max_candidate_requests
        self._batching = batching
        self._oldest: Ranking[float] = Ranking()  # overdue pools without a batch on its way, by their oldest request
        self._unseen: dict[str, None] = {}  # pools whose workers may have changed
        self._lenders: dict[str, WorkerRecord] = {}  # decode workers that can take a batch
        self._ranks: Ranking[LenderRank] = Ranking()

    def note(self, pool_name: str, now: float) -> None:
        self._unseen[pool_name] = None
        pool = self._pools.get(pool_name)
        is_young = pool is None or not pool.pooled or now - pool.oldest_s < self._batching.starvation_s
        if pool is None or is_young or self._is_served(pool):
            self._oldest.discard(pool_name)
        else:
            self._oldest.put(pool_name, pool.oldest_s)

    def _look_at_workers(self) -> None:
        unseen, self._unseen = self._unseen, {}
        for pool_name in unseen:
            pool = self._pools.get(pool_name)
            for worker in self._nodes.get(pool_name, {}).values():
                if can_take_batch(worker):
                    self._lenders[worker.name] = worker
                    self._ranks.put(worker.name, lender_rank(worker, pool))
                else:
                    self.forget(worker)

    def forget(self, worker: WorkerRecord) -> None:
        self._lenders.pop(worker.name, None)
        self._ranks.discard(worker.name)

    def choose(self, changed: Collection[str], now: float) -> list[FarBatch]:
        """Choose batches for pools that have waited too long, and workers for them; each at most once.

        `changed`: the pools noted since the last call. Only with them or their workers can a pair have become possible:
        the caller also notes a pool when its oldest request has waited for `starvation_s`.
        """
        chosen: list[FarBatch] = []
        engaged: set[str] = set()  # pools of chosen workers, which are idle no more; for membership only
        if not len(self._oldest):
            return chosen
        self._look_at_workers()
        with closing(self._oldest.in_order()) as names:
            for name in names:
                youngest = self._ranks.first()
                pool = self._pools[name]
                if youngest is None or not self._has_waited(pool, -youngest.rank[0], now):
                    break
                near = self._nodes.get(name, {}).values()
                if any(worker.name in self._lenders and is_idle_beside(pool, worker) for worker in near):
                    continue
                is_new = name in changed or name in engaged
                batch = self._batch_of(pool, None if is_new else changed, now)
                if batch is not None:
                    chosen.append(batch)
                    engaged.add(batch.worker.registered.pool_name)
                    self.forget(batch.worker)
        return chosen

    def _has_waited(self, pool: PoolRecord, other_oldest_s: float, now: float) -> bool:
        starvation_s = self._batching.starvation_s
        return now - pool.oldest_s >= starvation_s and other_oldest_s - pool.oldest_s >= starvation_s

    def _batch_of(self, pool: PoolRecord, among: Collection[str] | None, now: float) -> FarBatch | None:
        with closing(self._ranks.in_order() if among is None else self._in_order(among)) as names:
            for name in names:
                worker = self._lenders[name]
                own_pool = self._pools.get(worker.registered.pool_name)
                if not self._has_waited(pool, oldest_of(own_pool), now):
                    break
                limits = limits_of(worker, pool, self._max_candidate_requests, self._batching)
                if limits is not None:
                    return FarBatch(worker, pool, limits)
        return None

    def _in_order(self, among: Collection[str]) -> Generator[str, None, None]:
        ranked = [
            (lender_rank(worker, self._pools.get(pool)), worker.name)
            for pool in among
            for worker in self._nodes.get(pool, {}).values()
            if worker.name in self._lenders
        ]
        yield from (name for _, name in sorted(ranked))


def can_take_batch(worker: WorkerRecord) -> bool:
    is_decoder = worker.registered.can_decode and not worker.registered.can_prefill
    load = worker.load or WorkerLoad()
    return is_decoder and not worker.is_draining and not worker.awaits_batch and not load.num_batch_candidates


def is_idle_beside(pool: PoolRecord, worker: WorkerRecord) -> bool:
    load = worker.load or WorkerLoad()
    is_idle = can_take_batch(worker) and not worker.decoding and not load.num_running
    return (
        is_idle and BatchKind.BATCH not in worker.refused_kinds and pool.oldest_blocks <= worker.registered.num_blocks
    )


def oldest_of(pool: PoolRecord | None) -> float:
    """Return since when the oldest request of a worker's own pool has waited; infinity: it has none, or is lost."""
    return pool.oldest_s if pool is not None and pool.num_pooled else math.inf


def lender_rank(worker: WorkerRecord, own_pool: PoolRecord | None) -> LenderRank:
    return -oldest_of(own_pool), len(worker.decoding)


def is_batch_awaited(pool: str, workers: Iterable[WorkerRecord]) -> bool:
    return any(
        worker.pending_batch is not None and worker.asked_pool == pool and worker.requested_kind is not BatchKind.JOIN
        for worker in workers
    )


def limits_of(
    worker: WorkerRecord, pool: PoolRecord, max_candidate_requests: int, batching: BatchingConfig
) -> FarLimits | None:
    registered, load = worker.registered, worker.load or WorkerLoad()
    least_blocks = pool.oldest_blocks
    if pool.name in (registered.pool_name, *worker.refusing_pools) or least_blocks > registered.num_blocks:
        return None
    min_requests = batching.enough_requests(registered.max_running_requests)
    max_requests = registered.max_running_requests
    if not (batching.is_aligned and load.num_running >= min_requests):
        max_requests += max_candidate_requests - len(worker.decoding)
    max_requests = min(max_requests, pool.num_pooled)
    max_blocks = registered.num_blocks
    if worker.decoding:
        share = int(batching.max_block_share * registered.num_blocks)
        max_blocks = max(share - load.num_candidate_blocks, least_blocks)
    return FarLimits(max_blocks, max_requests, min(min_requests, max_requests)) if max_requests > 0 else None
