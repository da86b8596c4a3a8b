"""The status that every gateway hears of, about once a second."""

from msgspec.structs import replace

from alignedserve.messages.cluster_view import IterationLogTotals, WorkerSpeed
from alignedserve.messages.gateways import ClusterStatus, Demand, PrefixTotals
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import PoolLoad, PoolRegistered
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import IterationLogReport, WorkerLoad
from tests.harnesses.router import colocated_router, connected_router, decoding
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, epoch, request, worker


def without_view(status: Message) -> ClusterStatus:
    """Return a status without what is only for people who look on (test_cluster_view.py)."""
    assert isinstance(status, ClusterStatus)
    idle, fields = (
        ClusterStatus(),
        ("real_time", "best_effort", "workers", "trees", "times", "num_prompt_tokens", "block_size"),
    )
    return replace(status, **{name: getattr(idle, name) for name in fields})


def test_every_gateway_hears_of_the_status_at_every_fourth_tick_and_when_one_has_joined() -> None:
    made = decoding()
    made.link("gateway-1", Role.GATEWAY)
    made.submit(request("r2"))
    made.hear(POOL, PoolLoad(3, 0, 0, num_blocks_kept=2))
    made.hear(DECODE, WorkerLoad(num_running=1, num_free_blocks=18, num_handoffs_verified=5, num_evictions=4))
    cached = WorkerLoad(
        num_free_blocks=20,
        num_prefix_query_tokens=80,
        num_prefix_hit_tokens=60,
        num_prefix_blocks=12,
        num_prefix_evictions=3,
    )
    made.hear(PREFILL, cached)
    status = ClusterStatus(
        num_queued=0,
        num_prefilling=1,
        num_pooled=0,
        num_decoding=1,
        num_prefill_workers=1,
        num_decode_workers=1,
        num_pool_blocks=100,
        num_pool_blocks_used=3,
        num_worker_blocks=40,
        num_worker_blocks_used=2,
        num_preemptions=0,
        num_handoffs_verified=5,
        num_handoffs_refused=0,
        num_evictions=4,
        num_pool_blocks_kept=2,
        latest_attempt=epoch(2),
        demand=Demand(num_real_time=2, num_decode_places=4),
        prefixes=PrefixTotals(80, 60, 12, 3),
        num_places=4,
    )
    assert len(made.reports()) == 2
    assert [made.reports(), made.reports()] == [[], []]
    first, second = made.reports()
    assert (first.peer, second.peer) == (GATEWAY, "gateway-1")
    assert first.message == second.message
    assert without_view(first.message) == status


def test_workers_for_prompts_whose_pool_is_gone_are_counted() -> None:
    made = decoding()
    assert made.status().num_poolless_workers == 0
    made.lose(POOL)
    assert (made.status().num_prefill_workers, made.status().num_poolless_workers) == (1, 1)
    made.hear(POOL, PoolRegistered(100))
    assert made.status().num_poolless_workers == 0


def test_workers_that_decode_what_they_prefill_need_no_pool() -> None:
    assert colocated_router().status().num_poolless_workers == 0


def test_the_speed_is_that_of_the_slowest_for_prompts_and_of_the_slowest_that_decodes() -> None:
    made = connected_router()
    made.hear(PREFILL, worker(can_prefill=True, can_decode=False, speed=WorkerSpeed(0.1, 0.8, 9.0, 9.0)))
    made.hear(DECODE, worker(speed=WorkerSpeed(9.0, 9.0, 0.02, 0.05)))
    made.hear("decode-1", worker(speed=WorkerSpeed(9.0, 9.0, 0.03, 0.04)))
    assert made.status().speed == WorkerSpeed(0.1, 0.8, 0.03, 0.05)
    made.hear(PREFILL, IterationLogReport(IterationLogTotals(), speed=WorkerSpeed(0.1, 0.4)))
    made.hear(DECODE, IterationLogReport(IterationLogTotals()))
    assert made.status().speed == WorkerSpeed(0.1, 0.4, 0.03, 0.05)
