"""Points of calibration: in rounds, within limits and time, and enough to know a GPU's long prompts by."""

import pytest

from alignedserve.costmodel.iteration_points import SWAPPED, Point, calibrate, calibration_points
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel, Sample
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.online import learned_from
from lab.costmodel.choice import WorkerSpec, make_cost_model
from tests.support.costs import decodes, prefill
from tests.support.marks import each

POINTS = calibration_points(max_requests=256, max_tokens=2048, has_hidden_cache=False)


def calibrated(costs: CostModel, duration_s: float, points: list[Point] = POINTS) -> tuple[tuple[Sample, ...], float]:
    """Return the samples, and the time that they took."""
    elapsed_s = 0.0

    def measure(point: Point) -> float:
        nonlocal elapsed_s
        seconds = costs.swap_s(2 * point.num_swapped) if point.num_swapped else costs.iteration_s(point.work)
        elapsed_s += seconds
        return seconds

    samples = calibrate(points, measure, clock=lambda: elapsed_s, duration_s=duration_s)
    return samples, elapsed_s


def machine(token_s: float) -> LinearIterationModel:
    return LinearIterationModel(LinearCoefficients(base_s=0.01, prompt_token_s=token_s, decode_s=token_s))


def test_points_are_within_the_limits_of_an_iteration() -> None:
    few = calibration_points(max_requests=8, max_tokens=256, has_hidden_cache=True)
    assert max(point.num_requests for point in few) == 8
    assert max(point.num_tokens for point in few) == 256
    assert [len(point.hidden_contexts) for point in few[:5]] == [0, 0, 1, 8, 0]


def test_a_fast_machine_measures_long_prompts_in_several_rounds() -> None:
    samples, elapsed_s = calibrated(machine(token_s=2e-5), 2.0)
    assert [work.num_prompt_tokens for work, _ in samples].count(2048) > 1
    assert elapsed_s == pytest.approx(2.0, abs=0.1)


def test_a_slow_machine_leaves_out_what_would_take_longer_than_it_has() -> None:
    samples, elapsed_s = calibrated(machine(token_s=2e-3), 2.0)
    assert max(work.num_prompt_tokens for work, _ in samples) == 256
    assert elapsed_s < 2.1


@each("duration_s", [0.0, -1.0])
def test_no_time_is_no_samples(duration_s: float) -> None:
    assert calibrated(machine(2e-5), duration_s) == ((), 0.0)


def test_prompts_that_are_all_too_long_end_the_calibration() -> None:
    prompts = [point for point in POINTS if point.chunks and not point.contexts]
    samples, _ = calibrated(machine(token_s=0.1), 2.0, prompts)
    assert [work.num_prompt_tokens for work, _ in samples] == [16]


def test_iterations_without_cost_do_not_go_on_for_ever() -> None:
    assert 1 <= len(calibrated(machine(0.0), 1e9)[0]) <= 1024


@pytest.mark.parametrize("hardware", ["a100-80g", "h100"])
@pytest.mark.parametrize("model", ["llama-3-8b", "llama-2-13b"])
def test_a_gpu_is_known_from_the_start(model: str, hardware: str) -> None:
    """Its first hundreds of tokens cost nothing beside the weights: a straight line is off by a fifth and more."""
    costs = make_cost_model("roofline", WorkerSpec(model, hardware))
    learned = learned_from(calibrated(costs, 2.0)[0])
    prompts = [prefill(length) for length in (32, 100, 200, 300, 500, 1000, 1500, 2000)]
    for work in (*prompts, decodes(4, 500), decodes(16, 1500), decodes(64, 500)):
        assert learned.iteration_s(work) == pytest.approx(costs.iteration_s(work), rel=0.06)
    assert learned.iteration_s(decodes(200, 500)) == pytest.approx(costs.iteration_s(decodes(200, 500)), rel=0.15)


def test_copies_to_the_host_cost_what_was_measured() -> None:
    costs = LinearIterationModel(LinearCoefficients(base_s=0.01, decode_s=1e-4), swap_token_s=3e-5)
    learned = learned_from(calibrated(costs, 2.0)[0])
    assert learned.swap_s(100) == pytest.approx(costs.swap_s(100))
    assert learned.iteration_s(decodes(4, 100)) == pytest.approx(costs.iteration_s(decodes(4, 100)), rel=0.03)


def test_one_disturbed_copy_does_not_make_swapping_dear() -> None:
    samples = [Sample(SWAPPED.work, seconds) for seconds in (0.002, 0.002, 0.9)]
    assert learned_from(samples).swap_s(1) == pytest.approx(0.002 / 512)
