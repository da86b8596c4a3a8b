"""What the router tells people who look on: classes of requests, workers, ranges of lengths, times of requests."""

from alignedserve.core.request import RequestClass
from alignedserve.messages.cluster_view import BatchShape, LengthLeaf, LengthTree, PlacedTree, TierLoad, WorkerStatus
from alignedserve.messages.pools import PoolLoad
from alignedserve.messages.workers import IterationLogReport, RequestFinished, WorkerLoad
from tests.harnesses.router import colocated_router, connected_router, decoding
from tests.support.samples import DECODE, POOL, PREFILL, R1, TOTALS, epoch, request, worker


def test_requests_are_counted_by_class_and_stage() -> None:
    made = connected_router(max_prefill_tokens_per_worker=4)
    made.submit(request("r1"))
    made.submit(request("r2", request_class=RequestClass.BEST_EFFORT))
    made.submit(request("r3", request_class=RequestClass.BEST_EFFORT))
    made.now = 3.0
    status = made.status()
    assert status.real_time == TierLoad(num_prefilling=1)
    assert status.best_effort == TierLoad(num_queued=2, oldest_queued_s=3.0)


def test_workers_are_described_by_what_they_told() -> None:
    made = decoding()
    made.hear(DECODE, worker(node="node-1", num_places=3, can_move=True))
    made.hear(DECODE, WorkerLoad(num_waiting=5, num_running=2, num_free_blocks=18, lean=0.25))
    made.hear(DECODE, IterationLogReport(TOTALS, 7, BatchShape(2, 40, 44.0, 48)))
    made.hear(DECODE, IterationLogReport(TOTALS, 8, BatchShape(2, 41, 45.0, 49)))
    view = next(one for one in made.status().workers if one.worker == DECODE)
    assert view == WorkerStatus(
        DECODE,
        node="node-1",
        can_prefill=False,
        can_decode=True,
        is_elastic=True,
        lean=0.25,
        num_waiting=5,
        num_running=2,
        num_places=3,
        num_blocks=20,
        num_blocks_used=2,
        num_tokens=15,
        wall_s=16.0,
        compute_s=4.5,
        batch=BatchShape(2, 41, 45.0, 49),
    )
    assert made.status().num_tokens == 15
    made.hear(DECODE, WorkerLoad(num_free_blocks=20))
    assert next(one for one in made.status().workers if one.worker == DECODE).batch == BatchShape()


def test_prompt_tokens_are_counted_where_they_were_computed() -> None:
    status = decoding().status()
    assert {one.worker: one.num_prompt_tokens for one in status.workers} == {PREFILL: 4, DECODE: 0}
    assert status.num_prompt_tokens == 4


def test_the_pools_trees_are_passed_on() -> None:
    made = connected_router()
    tree = LengthTree(64, 4, (LengthLeaf(2, 1, 3),))
    made.hear(POOL, PoolLoad(3, 1, 0, lengths=tree))
    assert made.status().trees == (PlacedTree(POOL, tree),)


def test_where_no_pool_holds_requests_the_tree_is_of_the_router_s() -> None:
    made = colocated_router(num_blocks=100_000)
    for number, length in enumerate((1, 16, 17, 100_000)):
        made.submit(request(f"r{number}", length))
    leaves = (LengthLeaf(0, 2), LengthLeaf(1, 1), LengthLeaf(4095, 1))
    assert made.status().trees == (PlacedTree("", LengthTree(65_536, 16, leaves)),)


def test_times_of_requests_are_those_from_stage_to_stage() -> None:
    made = decoding()
    made.now = 3.0
    made.hear(DECODE, RequestFinished(R1, epoch(1, 2), 5))
    times = made.status().times
    assert (sum(times.queue.counts), times.queue.sum_s) == (1, 0.0)
    assert (sum(times.prefill.counts), times.prefill.sum_s) == (1, 0.0)
    assert (times.inference.counts[7], times.inference.sum_s) == (1, 3.0)  # above 2.5 s, up to 5 s
