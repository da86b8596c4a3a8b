"""The oracle of docs/experiments/walls.md computes every iteration in even parts at once."""

import pytest

from alignedserve.costmodel.work import IterationWork
from experiments.grid.systems import HARDWARE, MODEL
from experiments.walls import PARTS, SharedCosts
from lab.costmodel.choice import WorkerSpec, make_cost_model
from tests.support.marks import each

NUM = 4


def work_of(num_prompts: int, num_decodes: int) -> IterationWork:
    """Return chunks of 512 tokens after as many, and decodes of 1 000."""
    work = IterationWork()
    for _ in range(num_prompts):
        work.add_chunk(512, 512, is_last=False)
    for _ in range(num_decodes):
        work.add_decode(1000)
    return work


@each("part", PARTS)
def test_four_workers_take_as_long_for_four_times_the_requests_as_one_for_its_own(part: str) -> None:
    costs = make_cost_model(part, WorkerSpec(MODEL, HARDWARE))
    alone_s = costs.iteration_s(work_of(1, 8))
    assert SharedCosts(costs, NUM).iteration_s(work_of(NUM, NUM * 8)) == pytest.approx(alone_s)


@each("part", PARTS)
def test_a_prompt_in_four_parts_takes_over_a_quarter_of_its_time_and_decodes_read_all_weights(part: str) -> None:
    costs = make_cost_model(part, WorkerSpec(MODEL, HARDWARE))
    shared = SharedCosts(costs, NUM)
    assert 1 / NUM < shared.iteration_s(work_of(1, 0)) / costs.iteration_s(work_of(1, 0)) < 0.6
    assert shared.iteration_s(work_of(0, NUM)) == pytest.approx(costs.iteration_s(work_of(0, 1)))
