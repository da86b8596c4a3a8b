"""The separate batches of `aligned`: the example of its page, and its parameters."""

from alignedserve.config.sections import BatchingConfig, DecodeWorkerConfig
from alignedserve.core.ids import BatchId
from alignedserve.scheduling.policies import policy_config, policy_entry
from decode_worker.batching.batch_order import BatchOrder, WaitingBatch
from decode_worker.factory import batch_limits_of
from decode_worker.state import Candidate
from tests.support.marks import each
from tests.support.samples import handoff, request


def members(batch: int, count: int) -> list[Candidate]:
    return [
        Candidate.of_handoff(handoff(request(f"b{batch}-{number}"), 1), BatchId(batch), 0.0) for number in range(count)
    ]


def order(num_in_second: int) -> BatchOrder:
    """Build an order: batch 1 of six runs on a worker of eight places and 100 blocks; batch 2 was granted."""
    config = BatchingConfig(policy="density_first")
    made = BatchOrder(batch_limits_of(DecodeWorkerConfig(max_running_requests=8), config, num_blocks=100).switch)
    made.granted(WaitingBatch(BatchId(1), True, 6, 0.0))
    made.choose(members(1, 6), 0, 0.0)
    made.granted(WaitingBatch(BatchId(2), True, num_in_second, 0.0))
    return made


@each(("num_running", "num_blocks", "enters"), [(6, 66, False), (5, 55, True), (5, 75, False)])
def test_the_example_of_its_page_the_next_batch_takes_over_when_what_runs_is_too_small(
    num_running: int, num_blocks: int, *, enters: bool
) -> None:
    made = order(4)
    assert bool(made.choose(members(2, 4), num_running, 0.5, num_blocks=num_blocks)) == enters
    assert made.is_switching == enters


def test_the_example_of_its_page_a_batch_of_three_joins() -> None:
    made = order(3)
    assert len(made.choose(members(2, 3), 5, 0.5, num_blocks=55)) == 3
    assert (made.running_id, made.is_switching) == (1, False)


def test_its_parameters_are_the_papers() -> None:
    config = policy_config("aligned")
    assert (config.min_requests, config.max_block_share) == (36, 0.4)
    assert config.pack_share == 0.95  # this one is not of the paper
    assert policy_entry("aligned").batching == "density_first"
