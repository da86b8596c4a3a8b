"""Batches of another node's pool, for decode workers whose own pool is empty.

A decode worker takes batches of its own node's pool first: they are in memory that it maps. A request waits longer than
it must while every worker beside its pool is full and one elsewhere has a free slot; its blocks then travel, which
takes milliseconds where an aligned batch takes seconds. Of several pools the one over the fastest link is asked.

Example: pool-0 holds six requests and its only decode worker is full. decode-1 and decode-2, on other nodes, have
nothing to do: each gets three of them, if it has that many free slots.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from alignedserve.config.sections import BatchingConfig
from alignedserve.costmodel.hardware import LearnedLinks
from alignedserve.messages.workers import WorkerLoad
from router.pool_records import PoolRecord
from router.state import WorkerRecord


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
    """Return how many of its requests no worker of its node takes now, beside requests that were ordered.

    It is 0 while such a worker may get a batch or has just got one: it may have room for more.
    """
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
    """Share what is left in pools out over spare workers.

    `spare`: with the fewest requests first, `num_spare` of them; no more are looked at than get something. `left`:
    requests by pool, at least one in each. Workers are asked for at most once each.
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
