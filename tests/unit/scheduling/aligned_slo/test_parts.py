"""Tests that what a prompt takes in parts is the sum of its parts, each predicted by itself."""

import math

import pytest

from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policies.aligned_slo.packing import in_parts_s
from lab.costmodel.choice import WorkerSpec, make_cost_model


@pytest.mark.parametrize("num_cached", [0, 4000])
@pytest.mark.parametrize("part", [64, 500, 2048, 6666, 9000])
def test_it_is_the_sum_of_all_parts(part: int, num_cached: int) -> None:
    """Within a hundredth: a part of which keys cost more than matrices is a little above the mean of two."""
    costs = make_cost_model("roofline", WorkerSpec("opt-13b", "a100-80g"))
    decodes, now, num_tokens = IterationWork(), IterationWork(), 6666
    for context_len in (300, 1100, 4800):
        decodes.add_decode(context_len)
        now.add_decode(context_len)
    now.add_chunk(700, 0, is_last=True)  # another prompt, in this iteration only
    total_s, done = 0.0, 0
    while done < num_tokens:
        iteration, size = (decodes if done else now).copy(), min(part, num_tokens - done)
        iteration.add_chunk(size, num_cached + done, is_last=done + size == num_tokens)
        total_s, done = total_s + costs.iteration_s(iteration), done + size
    takes_s = in_parts_s(costs, num_tokens, part, num_cached, now=now, later=decodes)
    assert takes_s == pytest.approx(total_s, rel=0.01)


def test_without_a_part_it_never_ends() -> None:
    costs = make_cost_model("roofline", WorkerSpec("opt-13b", "a100-80g"))
    assert in_parts_s(costs, 100, 0, 0, now=IterationWork(), later=IterationWork()) == math.inf
