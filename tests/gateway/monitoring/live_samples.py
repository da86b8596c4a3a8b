"""A cluster at work, as its router reports it."""

from alignedserve.core.ids import BatchId
from alignedserve.messages.cluster_view import (
    BatchShape,
    FormedBatch,
    LengthLeaf,
    LengthTree,
    PlacedTree,
    RequestTimes,
    TierLoad,
    TimeSpread,
    WorkerStatus,
)
from alignedserve.messages.gateways import ClusterStatus, Demand, PrefixTotals, WorkerLean
from tests.support.samples import TOTALS

SPREAD = TimeSpread().with_time(0.25).with_time(1.75)
BUSY_STATUS = ClusterStatus(
    num_prefill_workers=2,
    num_decode_workers=1,
    num_pool_blocks=64,
    num_pool_blocks_used=48,
    num_worker_blocks=200,
    num_worker_blocks_used=50,
    iteration_log=TOTALS,
    demand=Demand(num_real_time=7, num_decode_places=8, queue_wait_s=1.5, num_at_risk=2),
    leans=(WorkerLean("decode-0", 0.25),),
    prefixes=PrefixTotals(800, 600, 12, 3),
    real_time=TierLoad(2, 1, 0, 4, 0.75),
    best_effort=TierLoad(9, 0, 3, 2, 30.0),
    workers=(
        WorkerStatus("prefill-0", can_decode=False, num_waiting=1, num_blocks=100, num_blocks_used=10),
        WorkerStatus(
            "decode-0",
            is_elastic=True,
            lean=0.25,
            num_running=6,
            num_places=8,
            num_blocks=100,
            num_blocks_used=40,
            num_prompt_tokens=5000,
            num_tokens=900,
            wall_s=8.0,
            compute_s=2.0,
            batch=BatchShape(6, 120, 150.5, 200),
        ),
    ),
    trees=(
        PlacedTree(
            "pool-0",
            LengthTree(
                65536, 16, (LengthLeaf(3, 2, 8), LengthLeaf(7, 1, 8)), FormedBatch(BatchId(4), "decode-0", 50, 60, 2, 8)
            ),
        ),
    ),
    times=RequestTimes(SPREAD, SPREAD, SPREAD),
    num_prompt_tokens=5000,
    num_tokens=900,
    block_size=16,
)
