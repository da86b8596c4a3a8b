"""Linear cost models, what is published, and how one is chosen."""

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest

from alignedserve.core.block_layout import LayerHeads
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.hardware import LinkModel, hardware
from alignedserve.costmodel.linear import (
    LinearCoefficients,
    LinearIterationModel,
    Sample,
    fit_error,
    fit_linear,
)
from alignedserve.costmodel.model import AttentionKernel, ShownSpeed, speed_of
from alignedserve.costmodel.model_shapes import model_shape
from alignedserve.costmodel.roofline import RooflineModel
from alignedserve.costmodel.work import IterationWork
from lab.costmodel.choice import COST_MODELS, WorkerSpec, make_cost_model
from lab.costmodel.profile_file import MachineProfile, read_profile
from lab.costmodel.published.llama_layers import MeasuredLayersModel, collective_curve
from lab.costmodel.published.prompt_tables import table_samples
from tests.harnesses.scheduling import EasyCosts
from tests.support.costs import decodes, prefill, random_work
from tests.support.marks import each

TRUE = LinearCoefficients(0.010, 1e-4, 1e-8, 1e-4, 2e-4, 1e-6, 3e-6, 1e-5, straggler=16.0)


def test_a_linear_model_adds_up() -> None:
    costs = LinearIterationModel(
        LinearCoefficients(1.0, 0.1, 0.01, 10.0, 100.0, 0.001, 0.5, 1000.0, straggler=4.0), 2.0
    )
    work = prefill(3, num_cached=10)  # 36 pairs, one sampled
    assert costs.iteration_s(work) == pytest.approx(1.0 + 0.3 + 0.36 + 10.0 + 1000.0)
    work.add_decode(50, is_hidden=True)
    work.add_decode(20)
    decoding = 200.0 + 0.5 * 50 + 2000.0
    assert costs.iteration_s(work) == pytest.approx(1011.66 + decoding + 0.2)  # 4 * 50 keys, as 70 are fewer
    more = work.copy()
    more.add_decodes(10, 500, 50)
    assert costs.iteration_s(more) == pytest.approx(1011.66 + decoding + 0.57 + 11000.0)
    work.swap_in_tokens, work.swap_out_tokens = 3000.0, 1000.5  # copies that take longer than the pass
    assert costs.iteration_s(work) == 8001.0
    assert costs.swap_s(2.5) == 5.0


def test_a_fit_finds_the_coefficients_that_made_the_samples() -> None:
    generator = random.Random(1)
    true = LinearIterationModel(TRUE)
    samples = [Sample(work, true.iteration_s(work)) for work in (random_work(generator) for _ in range(80))]
    fitted = fit_linear(samples, straggler=TRUE.straggler)
    assert dataclasses.astuple(fitted.coefficients) == pytest.approx(dataclasses.astuple(TRUE), rel=1e-5)
    assert fit_error(fitted, samples).p90 < 1e-6


def test_a_fit_has_no_negative_coefficient() -> None:
    """The larger prompt takes less time: the best line falls, the best that may be is flat in relative errors."""
    samples = [Sample(prefill(100), 1.0), Sample(prefill(200), 0.5)]
    coefficients = fit_linear(samples).coefficients
    assert min(dataclasses.astuple(coefficients)) == 0.0
    flat = sum(dataclasses.astuple(coefficients)[index] for index in (0, 3, 7))  # base, one chunk, one sampled
    assert flat == pytest.approx((1 / 1.0 + 1 / 0.5) / (1 / 1.0**2 + 1 / 0.5**2))
    assert coefficients.prompt_token_s == 0.0


def test_the_error_of_a_model() -> None:
    costs = LinearIterationModel(LinearCoefficients(base_s=1.0))
    samples = [Sample(prefill(1), seconds) for seconds in (1.0, 2.0, 0.8)]
    assert fit_error(costs, samples) == pytest.approx((3, 0.25, 0.45, 0.0))


BENT = LinearCoefficients(0.02, 0.0, 1e-8, 1e-4, 1e-5, 1e-6, 0.0, 1e-5, 0.0, 1e-4, 160)


def test_tokens_beyond_the_bend_cost_more() -> None:
    """260 tokens, 100 of them beyond 160: 0.02 + 33 930 pairs, a chunk, a sampled token, and 0.01."""
    work = IterationWork()
    work.add_chunk(260, 0, is_last=True)
    costs = LinearIterationModel(BENT)
    assert costs.iteration_s(work) == pytest.approx(0.02 + 33930e-8 + 1e-4 + 1e-5 + 100e-4)
    work = IterationWork()
    work.add_decodes(160, 1600, 10)
    assert costs.iteration_s(work) == pytest.approx(0.02 + 160 * (1e-5 + 1e-5) + 1600e-6)


def test_a_fit_finds_the_bend() -> None:
    generator = random.Random(3)
    true = LinearIterationModel(BENT)
    samples = [Sample(work, true.iteration_s(work)) for work in (random_work(generator) for _ in range(200))]
    fitted = fit_linear(samples).coefficients
    assert fitted.bend_tokens == 160
    assert dataclasses.astuple(fitted) == pytest.approx(dataclasses.astuple(BENT), rel=1e-4)


def test_noise_on_a_straight_line_is_no_bend() -> None:
    generator = random.Random(5)
    true = LinearIterationModel(TRUE)
    works = [random_work(generator) for _ in range(200)]
    samples = [Sample(work, true.iteration_s(work) * generator.lognormvariate(0.0, 0.1)) for work in works]
    fitted = fit_linear(samples, straggler=TRUE.straggler)
    assert fitted.coefficients.bend_tokens == fitted.coefficients.beyond_token_s == 0.0


# --- published


def test_distserve_says_what_its_fit_says() -> None:
    costs = make_cost_model("distserve")  # OPT-13B on one A100
    work = prefill(512)
    work.add_chunk(100, 0, is_last=True)
    milliseconds = 18.10254647486372 + 0.1019122572698738 * 612 + 7.122264314252114e-06 * (512**2 + 100**2)
    assert costs.iteration_s(work) == pytest.approx(milliseconds / 1000)
    small = 19.934702624895458 + 0.0006269356524350583 * 50 * 700 + 0.03850697740828398 * 50
    assert costs.iteration_s(decodes(50, 700)) == pytest.approx(small / 1000)
    large = 7.1661889468253595 + 0.0005798000403396046 * 120 * 100 + 0.15831096191764046 * 120
    assert costs.iteration_s(decodes(120, 100)) == pytest.approx(large / 1000)


def test_beyond_the_threshold_nothing_gets_cheaper() -> None:
    """The two decode fits meet at 95 requests, where the second says 1.3 ms less."""
    costs = make_cost_model("distserve")
    below, above = costs.iteration_s(decodes(94, 1)), costs.iteration_s(decodes(95, 1))
    assert below < above == pytest.approx(below, rel=0.01)


def test_a_chunk_beside_decodes_costs_the_linear_layers_once() -> None:
    costs = make_cost_model("distserve")
    work = decodes(10, 500)
    work.add_chunk(200, 300, is_last=False)
    num_squares = 2 * work.prompt_pairs - 200  # 200 * 200 + 2 * 200 * 300
    assert num_squares == 160000
    prefilled = 18.10254647486372 + 0.1019122572698738 * 210 + 7.122264314252114e-06 * num_squares
    attended = 0.0006269356524350583 * 5000
    assert costs.iteration_s(work) == pytest.approx((prefilled + attended) / 1000)
    assert costs.iteration_s(work) < costs.iteration_s(prefill(200)) + costs.iteration_s(decodes(10, 500))


def test_a_straggler_makes_all_as_long_as_itself() -> None:
    costs = make_cost_model("distserve", WorkerSpec(kernel=AttentionKernel.ONE_BLOCK_PER_SEQUENCE))
    mixed = decodes(9, 100)
    mixed.add_decode(1000)
    assert costs.iteration_s(mixed) == costs.iteration_s(decodes(10, 1000))


def test_vidur_layers_are_looked_up() -> None:
    costs = make_cost_model("vidur", WorkerSpec(model="llama-2-7b"))
    assert costs.layers_s(1024) == pytest.approx(32 * 2.135e-3)  # type: ignore[attr-defined]
    assert costs.layers_s(1280) == pytest.approx(32 * 2.624e-3)  # type: ignore[attr-defined]
    assert collective_curve("h100", "send_recv", 2).at(1 << 26) == pytest.approx(0.188e-3)


def test_an_iteration_by_vidur_is_the_roofline_s_but_for_its_layers() -> None:
    worker = WorkerSpec(model="llama-2-7b")
    measured, roofline = (
        MeasuredLayersModel("a100-80g", 1, worker.kernel),
        RooflineModel(worker.shape, hardware("a100-80g")),
    )
    for work in (prefill(1024), decodes(8, 500)):
        layers_s = measured.layers_s(work.num_tokens) - roofline.layers_s(work.num_tokens)
        assert abs(layers_s) > 1e-4
        assert measured.iteration_s(work) - roofline.iteration_s(work) == pytest.approx(layers_s)


def test_splitwise_is_fitted_within_a_fifth() -> None:
    spec = WorkerSpec(model="llama-2-70b", hardware="h100", tensor_parallel=4)
    error = fit_error(make_cost_model("splitwise", spec), table_samples("llama-2-70b", "h100", 4))
    assert error.num_samples == 38
    assert error.median < 0.1
    assert error.p90 < 0.2


def test_failed_runs_of_the_table_are_left_out() -> None:
    """64 prompts on two accelerators took a tenth of the time of 32: out of memory."""
    times = [seconds for work, seconds in table_samples("llama-2-70b", "a100-80g", 2) if work.num_chunks == 64]
    assert not times


# --- chosen by name


@each("source", COST_MODELS)
def test_every_model_grows_with_the_work(source: str) -> None:
    model = {"vidur": "llama-2-7b", "splitwise": "llama-2-70b"}.get(source, "opt-13b")
    for kernel in AttentionKernel:
        spec = WorkerSpec(model=model, tensor_parallel=2, kernel=kernel)
        assert_grows(source, spec)


def assert_grows(source: str, spec: WorkerSpec) -> None:
    costs = make_cost_model(source, spec)
    generator = random.Random(source)
    for _ in range(60):
        work = random_work(generator)
        seconds = costs.iteration_s(work)
        assert seconds > 0.0
        for _ in range(8):
            if generator.random() < 0.5:
                num_tokens, num_cached = generator.randint(1, 100), generator.randint(0, 1000)
                work.add_chunk(num_tokens, num_cached, is_last=generator.random() < 0.5)
            else:
                work.add_decode(generator.randint(1, 3000), is_hidden=generator.random() < 0.3)
            before, seconds = seconds, costs.iteration_s(work)
            assert seconds >= before - 1e-12


@each(
    ("source", "spec", "problem"),
    [
        ("guess", None, "none of roofline, distserve, vllm, vidur, splitwise, calibrated, contended, fitted:FILE"),
        ("roofline", WorkerSpec(model="opt-14b"), "model 'opt-14b' is none of opt-125m, "),
        ("roofline", WorkerSpec(hardware="a10"), "hardware 'a10' is none of v100-32g, "),
        ("roofline", WorkerSpec(tensor_parallel=3), "tensor_parallel must divide the 40 heads"),
        ("roofline", WorkerSpec(model=model_shape("opt-13b", "bfloat16"), hardware="v100-32g"), "has no bfloat16"),
        ("distserve", WorkerSpec(hardware="h100"), "measured on a100-80g, not on h100"),
        ("vllm", WorkerSpec(tensor_parallel=8), "no 'opt-13b' x 8 accelerators; it has opt-13b x 1, "),
        ("vidur", WorkerSpec(), "of llama-2-7b, not of opt-13b"),
        ("vidur", WorkerSpec(model="llama-2-7b", hardware="h200"), "no llama-2-7b on h200 x 1; it has a100-80g x 1, "),
        ("splitwise", WorkerSpec(), "no 'opt-13b' on a100-80g x 1; it has bloom-176b on a100-80g x 8, "),
        ("fitted:nowhere.json", None, "nowhere.json cannot be read"),
        ("fitted:nowhere.json", WorkerSpec(), "cannot be chosen"),
    ],
)
def test_what_there_is_not_is_said(source: str, spec: WorkerSpec | None, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
        make_cost_model(source, spec)


# --- profiles

PROFILE = MachineProfile(model_shape("opt-125m", "bfloat16"), TRUE, LinkModel(1e-6, 4e9))


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for shape in (PROFILE.shape, dataclasses.replace(PROFILE.shape, unlike=(LayerHeads(3, 1, 96),))):
        profile = dataclasses.replace(PROFILE, shape=shape)
        path.write_text(json.dumps({**profile.as_fields(), "samples": []}))
        assert read_profile(path) == profile
    later = (
        "num_exp",
        "num_chosen",
        "expert",
        "shared",
        "kv_parts",
        "attention",
        "num_cached",
        "num_state",
        "state_",
        "num_windowed",
        "window",
    )
    of_earlier_versions = {
        name: value
        for name, value in dataclasses.asdict(PROFILE.shape).items()
        if not name.startswith((*later, "unlike"))
    }
    assert len(of_earlier_versions) == 12
    path.write_text(json.dumps({**PROFILE.as_fields(), "shape": of_earlier_versions}))
    assert read_profile(path) == PROFILE
    costs = make_cost_model(f"fitted:{path}")
    assert costs.iteration_s(prefill(7)) == LinearIterationModel(TRUE).iteration_s(prefill(7))
    assert costs.swap_s(100) == pytest.approx(100 * 36864 / 4e9)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": 2}, "no profile of format 1"),
        ({"coefficients": {"base_s": 1.0}}, "coefficients must hold base_s, "),
        ({"memory_link": {"latency_s": 0.0, "bytes_per_s": 0.0}}, "bytes_per_s must be above 0"),
        ({"memory_link": {"latency_s": -1.0, "bytes_per_s": 1.0}}, "latency_s must be a number of at least 0"),
        ({"memory_link": {"latency_s": "1", "bytes_per_s": 1.0}}, "latency_s must be a number"),
        ({"shape": {**dataclasses.asdict(PROFILE.shape), "num_layers": 1.5}}, "shape.num_layers must be of type int"),
        ({"shape": {**dataclasses.asdict(PROFILE.shape), "unlike": [[1, 2]]}}, "shape.unlike must hold lists of three"),
    ],
)
def test_bad_profiles(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**PROFILE.as_fields(), **changes}))
    with pytest.raises(ConfigError, match=problem):
        read_profile(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_files_that_are_no_profiles(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"profile\.json"):
        read_profile(path)


def test_prompts_and_tokens_alone() -> None:
    speed = speed_of(EasyCosts(), max_tokens=4096, max_context_len=8192)
    assert speed == pytest.approx((0.010 + 0.064, 0.010 + 1.024, 0.010 + 0.001 + 0.00512, 0.010 + 0.004 + 4 * 0.00512))


def test_the_shortest_iterations_of_the_last_hour_are_what_a_machine_can_do() -> None:
    """Beside a busy process an iteration may take a hundred times as long; it never takes less than it needs."""
    shown, half_hour_s = ShownSpeed(), 1800.0
    assert shown.at(0.0) == (math.inf, math.inf)
    for seconds in (40.0, 0.5, 3.0):
        shown.note(prefill(512), seconds, 0.0)
        shown.note(decodes(8, 64), seconds / 10.0, 0.0)
        shown.note(decodes(3, 64), 1e-6, 0.0)  # too few
        together = decodes(8, 64)
        together.add_chunk(64, 0, is_last=True)
        shown.note(together, 1e-6, 0.0)
    assert shown.at(half_hour_s) == (1.0, 0.05)
    shown.note(prefill(4096), 2.0, half_hour_s)  # no longer than all of it
    assert shown.at(half_hour_s) == (1.0, 0.05)
    assert shown.at(2 * half_hour_s) == (2.0, math.inf)
    assert shown.at(3 * half_hour_s) == (math.inf, math.inf)


def test_a_prompt_takes_as_many_iterations_as_its_chunks() -> None:
    assert speed_of(EasyCosts(), max_tokens=100, max_context_len=8192).prompt_s == pytest.approx(11 * 0.010 + 1.024)


def test_where_little_fits_the_usual_prompt_is_half_of_it() -> None:
    speed = speed_of(EasyCosts(), max_tokens=4096, max_context_len=80)
    assert speed[:3] == pytest.approx((0.050, 0.050, 0.010 + 0.001 + 0.0004))
