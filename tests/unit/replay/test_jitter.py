"""Jitter: the ratios of a recorded run, in runs, each kind of iteration by its own."""

import itertools
import random
import statistics

from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel
from alignedserve.replay.jitter import JitteryCosts, Ratio
from tests.harnesses.costs import decodes, prefill

COSTS = LinearIterationModel(LinearCoefficients(base_s=1.0))


def test_iterations_with_a_prompt_take_ratios_of_such() -> None:
    ratios = [Ratio(1.0 + number / 1000, has_prompt=number % 5 == 0) for number in range(100)]
    costs = JitteryCosts(COSTS, ratios, seed=3)
    generator = random.Random(1)
    for _ in range(300):
        has_prompt = generator.random() < 0.3
        taken = costs.iteration_s(prefill(10) if has_prompt else decodes(2, 10))
        assert (round((taken - 1.0) * 1000) % 5 == 0) is has_prompt


def test_runs_go_on_as_they_were_recorded() -> None:
    costs = JitteryCosts(COSTS, [Ratio(float(number)) for number in range(1, 41)], seed=0)
    taken = [costs.iteration_s(decodes(1, 10)) for _ in range(16)]
    assert [(after - before) % 40 for before, after in itertools.pairwise(taken)] == [1.0] * 15


def test_a_kind_that_was_never_recorded_takes_any_ratio() -> None:
    costs = JitteryCosts(COSTS, [Ratio(2.0), Ratio(4.0)], seed=0)
    assert {costs.iteration_s(prefill(10)) for _ in range(40)} == {2.0, 4.0}


def test_the_mean_of_each_kind_is_kept() -> None:
    ratios = [Ratio(1.2, has_prompt=True), *[Ratio(0.9)] * 9] * 20
    costs = JitteryCosts(COSTS, ratios, seed=5)
    assert statistics.fmean(costs.iteration_s(prefill(10)) for _ in range(50)) == 1.2
    assert costs.iteration_s(decodes(1, 10)) == 0.9
