"""Describes the router's records for people who look on: requests by class, workers, ranges of context lengths."""

from collections.abc import Collection

from alignedserve.core.lifecycle import Stage
from alignedserve.core.request import RequestClass
from alignedserve.messages.cluster_view import BatchShape, PlacedTree, TierLoad, WorkerView, tree_of
from router.placement import Placement
from router.state import TrackedRequest, WorkerRecord

_SMALLEST_RANGE = 16  # tokens; of the tree of the router's own requests
_NUM_LEVELS = 6  # of that tree: 16 * 4 ** 6 tokens are 65 536


def tier_load(requests: Collection[TrackedRequest], request_class: RequestClass, now: float) -> TierLoad:
    """Count the requests of one class by stage."""
    members = [tracked for tracked in requests if tracked.request.request_class is request_class]
    stages = [tracked.stage for tracked in members]
    arrivals_s = [tracked.request.arrival_s for tracked in members if tracked.stage is Stage.QUEUED]
    return TierLoad(
        num_queued=len(arrivals_s),
        num_prefilling=stages.count(Stage.PREFILLING),
        num_pooled=stages.count(Stage.POOLED),
        num_decoding=stages.count(Stage.DECODING),
        oldest_queued_s=max(now - min(arrivals_s, default=now), 0.0),
    )


def worker_view(worker: WorkerRecord) -> WorkerView:
    """Describe one worker: its load as it reported it last, else what it was given."""
    registered, load, done = worker.registered, worker.load, worker.done
    num_running = load.num_running if load is not None else 0
    return WorkerView(
        worker=worker.name,
        node=registered.node,
        can_prefill=registered.can_prefill,
        can_decode=registered.can_decode,
        is_elastic=registered.can_move,
        is_draining=worker.is_draining,
        lean=worker.lean,
        num_waiting=load.num_waiting if load is not None else len(worker.prefilling),
        num_running=num_running,
        num_places=worker.num_places,
        num_blocks=registered.num_blocks,
        num_blocks_used=worker.num_blocks_used,
        num_prompt_tokens=done.num_prompt_tokens,
        num_tokens=done.num_tokens,
        wall_s=done.wall_s,
        compute_s=done.compute_s,
        batch=done.batch if num_running else BatchShape(),
    )


def trees_of(requests: Collection[TrackedRequest], placement: Placement) -> tuple[PlacedTree, ...]:
    """Return the trees of all pools; where requests wait in none, that of the requests' contexts on their arrival.

    Workers that prefill and decode keep a request, so that the router has none of the pools' trees then.
    """
    pools = [pool for pool in placement.pools.values() if pool.lengths.max_len]
    if pools:
        return tuple(PlacedTree(pool.name, pool.lengths) for pool in pools)
    leaves: dict[int, tuple[int, int]] = {}
    for tracked in requests:
        index = min((tracked.num_prefill_tokens - 1) // _SMALLEST_RANGE, 4**_NUM_LEVELS - 1)
        leaves[index] = (leaves.get(index, (0, 0))[0] + 1, 0)
    tree = tree_of(leaves, leaf_len=_SMALLEST_RANGE, max_len=_SMALLEST_RANGE * 4**_NUM_LEVELS)
    return (PlacedTree("", tree),)
