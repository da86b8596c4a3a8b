"""A placement to ask: a pool, and decode workers with requests in every place."""

from typing import Any

from alignedserve.config.sections import BatchingConfig
from alignedserve.core.ids import BatchId, WorkerName
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.pools import FormBatch, PoolRegistered
from alignedserve.messages.workers import JoinedBatch, WorkerLoad
from router.placement import Placement
from router.state import TrackedRequest
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, request, worker

ASKED, OTHER_POOL = WorkerName(DECODE), "pool-1"
RUNNING = JoinedBatch(BatchId(1), 32, 48)
# A worker runs at most four; half of them are enough to keep it busy.
SATURATED = {"num_running": 3, "num_free_blocks": 8}
Asked = list[tuple[str, FormBatch]]


def empty_fleet(**batching: Any) -> Placement:
    return Placement(max_candidate_requests=2, batching=BatchingConfig(min_requests=3, **batching))


def placement(batching: dict[str, Any] | None = None, **decoders: dict[str, Any]) -> Placement:
    """Build a pool, and decode workers by name with what is special about them."""
    made = empty_fleet(**(batching or {}))
    made.register(POOL, PoolRegistered(100))
    for name, changes in decoders.items():
        made.register(name.replace("_", "-"), worker(**changes))
    return made


def pool_requests(
    where: Placement, count: int, prefix: str = "p", pool: str = POOL, num_blocks: int = 1, now: float = 0.0
) -> list[TrackedRequest]:
    tracked = [TrackedRequest(request(f"{prefix}{number}"), GATEWAY, 1.0) for number in range(count)]
    for one in tracked:
        one.move(Stage.PREFILLING, PREFILL)
        one.pooled_s = now
        where.set_pooled(one, pool, num_blocks)
    return tracked


def decoding(where: Placement, name: str, count: int) -> list[TrackedRequest]:
    tracked = pool_requests(where, count, name)
    for one in tracked:
        where.set_decoding(one, where.workers[name])
    return tracked


def busy(num_pooled: int, batching: dict[str, Any] | None = None, now: float = 0.0, **load: Any) -> Placement:
    """Let decode-0 run three requests of its first batch, granted at `now`; so many more wait in the pool."""
    where = placement(batching, decode_0={})
    decoding(where, DECODE, 3)
    where.workers[DECODE].last_batch_s = now
    pool_requests(where, num_pooled)
    where.update_load(DECODE, WorkerLoad(**{**SATURATED, **load}))
    return where


def refuse(where: Placement) -> None:
    """Let the pool have nothing for decode-0."""
    where.close_batch_request(where.workers[DECODE], is_empty=True, now=0.0)


def form(number: int, max_blocks: int, max_requests: int, min_requests: int, **changes: Any) -> Asked:
    return [(POOL, FormBatch(BatchId(number), ASKED, max_blocks, max_requests, min_requests, **changes))]
