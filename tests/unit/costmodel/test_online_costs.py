"""A cost model that learns from a worker's iterations."""

import dataclasses
import random

import pytest

from alignedserve.costmodel.iteration_points import SWAPPED, Point, calibrate, calibration_points
from alignedserve.costmodel.linear import (
    LinearCoefficients,
    LinearIterationModel,
    Sample,
    fit_error,
)
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.online import GENERIC, OnlineIterationModel, learned_from
from alignedserve.costmodel.work import IterationWork
from kernels.cpu.iteration_costs import is_native
from lab.costmodel.choice import WorkerSpec, make_cost_model
from tests.support.costs import decodes, prefill, random_work
from tests.support.marks import each

MACHINE = LinearIterationModel(LinearCoefficients(0.004, 3e-4, 1e-8, 1e-4, 2e-4, 3e-7, 1e-5, 1e-5))


def learn(
    costs: OnlineIterationModel, num: int, *, outliers: float = 0.0, machine: LinearIterationModel = MACHINE
) -> None:
    generator = random.Random(num)
    for _ in range(num):
        work = random_work(generator)
        noise = generator.lognormvariate(0.0, 0.05) * (8.0 if generator.random() < outliers else 1.0)
        costs.observe(work, machine.iteration_s(work) * noise)


# What DistServe's published figures come to, as far as a weighted sum can say.
MEASURED_ELSEWHERE = LinearCoefficients(
    base_s=0.01885,
    prompt_token_s=9.97e-5,
    prompt_pair_s=1.49e-8,
    decode_s=7.04e-5,
    context_token_s=6.08e-7,
    hidden_token_s=1.69e-5,
)


def held_out() -> list[Sample]:
    generator = random.Random(99)
    return [Sample(work, MACHINE.iteration_s(work)) for work in (random_work(generator) for _ in range(60))]


def test_before_any_iteration_it_says_what_the_prior_says() -> None:
    work = prefill(100)
    assert OnlineIterationModel().iteration_s(work) == LinearIterationModel(GENERIC).iteration_s(work)
    prior = LinearIterationModel(MEASURED_ELSEWHERE, 3.2e-5)
    costs = OnlineIterationModel(prior.coefficients, prior.swap_token_s)
    assert costs.iteration_s(work) == prior.iteration_s(work)
    assert costs.swap_s(3) == prior.swap_s(3)


def test_the_first_iteration_sets_how_fast_the_machine_is() -> None:
    costs = OnlineIterationModel()
    costs.observe(decodes(4, 100), 7.0)
    assert costs.iteration_s(decodes(4, 100)) == pytest.approx(7.0, rel=1e-6)
    assert costs.iteration_s(prefill(100)) == pytest.approx(7.0, rel=1.5)


def test_it_learns_a_machine_from_noisy_iterations() -> None:
    for prior in (GENERIC, MEASURED_ELSEWHERE):
        costs = OnlineIterationModel(prior)
        learn(costs, 600, outliers=0.02)
        error = fit_error(costs, held_out())
        assert error.median < 0.03
        assert error.p90 < 0.10


@each(("times", "most"), [(50.0, 0.03), (1e-6, 0.05)])
def test_one_disturbed_iteration_changes_little(times: float, most: float) -> None:
    costs = OnlineIterationModel()
    learn(costs, 300)
    work = decodes(16, 500)
    before = costs.iteration_s(work)
    costs.observe(work, times * before)
    assert costs.iteration_s(work) == pytest.approx(before, rel=most)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    costs = OnlineIterationModel()
    learn(costs, 400)
    slower = LinearCoefficients(*(2 * value for value in dataclasses.astuple(MACHINE.coefficients)))
    learn(costs, 1500, machine=LinearIterationModel(slower))
    samples = [Sample(work, 2 * seconds) for work, seconds in held_out()]
    assert fit_error(costs, samples).median < 0.05


def test_what_it_has_not_seen_stays_in_proportion() -> None:
    """Thousands of equal decode iterations on a machine ten times as slow as the prior: a prompt is too."""
    costs = OnlineIterationModel()
    work, prompt = decodes(16, 500), prefill(200)
    for _ in range(3000):
        costs.observe(work, 10 * LinearIterationModel(GENERIC).iteration_s(work))
    assert costs.iteration_s(prompt) == pytest.approx(10 * LinearIterationModel(GENERIC).iteration_s(prompt), rel=0.05)


def test_it_is_never_negative_and_always_grows() -> None:
    """Times that have nothing to do with the work."""
    generator = random.Random(4)
    costs = OnlineIterationModel()
    for _ in range(500):
        costs.observe(random_work(generator), generator.lognormvariate(-3.0, 2.0))
        assert min(dataclasses.astuple(costs.coefficients)) >= 0.0
        assert 0.0 < costs.iteration_s(prefill(10)) <= costs.iteration_s(prefill(11)) < 1e3


def test_a_bent_machine_stays_bent_while_it_learns() -> None:
    bent = LinearCoefficients(0.02, 1e-6, 1e-8, 1e-5, 1e-6, 1e-6, 1e-6, 1e-6, 0.0, 1e-4, 160)
    machine = LinearIterationModel(bent)
    costs = OnlineIterationModel(LinearCoefficients.of([2 * weight for weight in bent.weights], bent.form))
    learn(costs, 400, machine=machine)
    works = [*(prefill(length) for length in (50, 200, 400, 900)), decodes(40, 800)]
    assert fit_error(costs, [Sample(work, machine.iteration_s(work)) for work in works]).median < 0.03


def test_iterations_that_waited_for_copies_teach_nothing() -> None:
    costs = OnlineIterationModel(swap_token_s=0.001)
    work = decodes(4, 100)
    work.swap_in_tokens = 1e4
    costs.observe(work, 10.0)
    assert costs.num_observed == 0
    assert costs.iteration_s(work) == 10.0


def test_the_same_history_gives_the_same_model() -> None:
    first, second = OnlineIterationModel(), OnlineIterationModel()
    for costs in (first, second):
        learn(costs, 100, outliers=0.1)
    assert first.coefficients == second.coefficients


def test_work_is_left_as_it_was() -> None:
    work = decodes(4, 100)
    OnlineIterationModel().observe(work, 1.0)
    assert work == IterationWork(num_decodes=4, decode_context_len=400, max_decode_context_len=100, num_sampled=4)


def test_the_time_of_copies_is_learned_from_iterations_that_waited_for_them() -> None:
    machine = LinearIterationModel(LinearCoefficients(base_s=0.01, prompt_token_s=1e-4), swap_token_s=4e-5)
    computing = [IterationWork(num_prompt_tokens=count, num_chunks=1) for count in (16, 256, 1024)]
    costs = learned_from([Sample(work, machine.iteration_s(work)) for work in computing * 5])
    assert costs.swap_s(1) == pytest.approx(2.5e-5, rel=0.1)  # a quarter of a token's computing, until it is known
    for _ in range(30):
        work = IterationWork(num_prompt_tokens=16, num_chunks=1, swap_out_tokens=3000.0)
        costs.observe(work, machine.iteration_s(work))
    assert costs.swap_s(1) == pytest.approx(4e-5, rel=0.01)
    assert costs.iteration_s(computing[1]) == pytest.approx(machine.iteration_s(computing[1]), rel=0.05)


def test_copies_that_no_iteration_waited_for_take_no_longer_than_it_did() -> None:
    machine = LinearIterationModel(LinearCoefficients(base_s=0.01, prompt_token_s=1e-4), swap_token_s=1e-7)
    costs = learned_from([Sample(IterationWork(num_prompt_tokens=100), 0.02)])
    for _ in range(50):
        work = IterationWork(num_prompt_tokens=100, swap_in_tokens=2000.0)
        costs.observe(work, machine.iteration_s(work))
    assert costs.swap_s(2000) <= 0.021


def test_a_slow_iteration_with_few_copies_does_not_make_swapping_dear() -> None:
    """One that took a few percent longer than predicted once tripled what a copy was believed to take, for good."""
    machine = LinearIterationModel(LinearCoefficients(base_s=0.01, prompt_token_s=1e-4), swap_token_s=4e-5)
    costs = OnlineIterationModel(machine.coefficients, machine.swap_token_s)
    for num_copied, slower in ((0, 1.0), (0, 1.0), (64, 1.05), (64, 3.0)):
        work = IterationWork(num_prompt_tokens=256, swap_out_tokens=float(num_copied))
        costs.observe(work, slower * machine.iteration_s(work))
    assert costs.swap_s(1) == machine.swap_s(1)


def test_one_iteration_makes_copies_a_fifth_dearer_at_most() -> None:
    costs = OnlineIterationModel(swap_token_s=1e-4)
    costs.observe(IterationWork(num_prompt_tokens=16, swap_out_tokens=3000.0), 100.0)
    assert costs.swap_s(1) == pytest.approx(1.2e-4)


@pytest.mark.skipif(not is_native(), reason="the native kernels are not built")
@pytest.mark.parametrize(
    "prior", [GENERIC, MEASURED_ELSEWHERE, dataclasses.replace(MEASURED_ELSEWHERE, straggler=66.0)]
)
def test_the_kernel_learns_the_same_to_the_last_bit(prior: LinearCoefficients) -> None:
    native, plain = (OnlineIterationModel(prior, 1e-5, allow_kernels=allowed) for allowed in (True, False))
    for costs in (native, plain):
        learn(costs, 150, outliers=0.1)
    assert native.coefficients == plain.coefficients


def test_what_grammars_take_is_learned_apart() -> None:
    """A worker begins with the generic price; a hundred iterations later it knows its own, and all else as without."""
    costs, plain, generator = OnlineIterationModel(), OnlineIterationModel(), random.Random(5)
    for _ in range(100):
        work, seconds = random_work(generator), generator.lognormvariate(-3.0, 0.1)
        plain.observe(work, seconds)
        work.num_constrained = generator.randint(0, work.num_decodes)
        grammar_s = 3e-4 * work.num_constrained
        costs.observe(work, seconds + grammar_s, grammar_s)
    constrained, free = decodes(32, 200), decodes(32, 200)
    constrained.num_constrained = 32
    assert costs.iteration_s(free) == pytest.approx(plain.iteration_s(free), rel=1e-6)
    assert costs.iteration_s(constrained) - costs.iteration_s(free) == pytest.approx(32 * 3e-4, rel=0.05)
    assert costs.coefficients.constrained_s == pytest.approx(3e-4, rel=0.05)


def test_iterations_whose_grammars_were_not_timed_leave_their_price() -> None:
    costs, work = OnlineIterationModel(), decodes(32, 200)
    work.num_constrained = 32
    before_s = costs.coefficients.constrained_s
    for _ in range(20):
        costs.observe(work, 0.1)
    assert costs.coefficients.constrained_s == before_s
    assert costs.iteration_s(work) == pytest.approx(0.1, rel=0.01)


# Points of calibration: in rounds, within limits and time, and enough to know a GPU's long prompts by.

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
