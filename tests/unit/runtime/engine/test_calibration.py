"""A worker measures what iterations cost before it serves, and its policy begins with that."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from alignedserve.config.sections import BatchingConfig, EngineConfig, SchedulingConfig
from alignedserve.costmodel.iteration_points import calibration_points
from alignedserve.costmodel.linear import LinearCoefficients, LinearIterationModel, Sample
from alignedserve.costmodel.online import learned_from
from alignedserve.costmodel.straggler import Straggler
from alignedserve.runtime.device.streams import HostStreams
from alignedserve.runtime.engine import measured_iterations
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.measured_iterations import KeptCalibration, measure_iterations
from alignedserve.runtime.engine.swap_space import SwapSpace
from alignedserve.runtime.model.model_files import parse_model_config
from alignedserve.runtime.model.weight_files import load_weights
from alignedserve.scheduling.factory import calibration_s, make_scheduler
from alignedserve.scheduling.policy import IterationLimits
from tests.support.costs import decodes, prefill
from tests.support.models.tiny_engines import MAX_CONTEXT_LEN, TinyEngine
from tests.support.models.tiny_llama import TINY_LLAMA

MACHINE = LinearIterationModel(
    LinearCoefficients(base_s=0.015, prompt_token_s=5e-4, prompt_pair_s=4e-7, decode_s=6e-4, context_token_s=1e-5)
)


def measured(
    duration_s: float,
    max_sequences: int = 16,
    *,
    has_hidden_cache: bool = False,
    swaps: str | None = None,
    kept: KeptCalibration | None = None,
    reading_s: float = 1.0,
    computing_s: float | None = None,
) -> tuple[Sample, ...]:
    """Measure a tiny engine by a clock that goes on by a second each time it is read."""
    of_own = {"num_key_value_heads": TINY_LLAMA["num_attention_heads"]} if has_hidden_cache else {}
    config = parse_model_config({**TINY_LLAMA, **of_own})
    decoder = Decoder(config, load_weights(None, config, torch.float32))
    tiny = TinyEngine(decoder, has_hidden_cache=has_hidden_cache)
    seconds: Iterator[int] = count()
    computing: Iterator[int] = count()
    swap_space = SwapSpace(tiny.storage, HostStreams(), is_int8=swaps == "int8") if swaps else None
    samples = measure_iterations(
        tiny.engine,
        swap_space,
        max_sequences=max_sequences,
        max_context_len=MAX_CONTEXT_LEN,
        max_tokens=512,
        duration_s=duration_s,
        clock=lambda: reading_s * next(seconds),
        computing_clock=None if computing_s is None else lambda: computing_s * next(computing),
        kept=kept,
    )
    assert len(tiny.engine._table) == 0
    return samples


def test_what_was_measured_is_kept_for_a_start_that_takes_as_long(tmp_path: Path) -> None:
    first = measured(60.0, kept=KeptCalibration(tmp_path, ("a model",)))
    again = measured(1e-9, kept=KeptCalibration(tmp_path, ("a model",)))  # no time to measure more than one
    assert sorted(again, key=repr) == sorted(first, key=repr)
    assert len(measured(1e-9, kept=KeptCalibration(tmp_path, ("another model",)))) == 1


def test_a_process_that_was_lost_measures_nothing_where_something_is_kept(tmp_path: Path) -> None:
    again = KeptCalibration(tmp_path, ("a model",), is_again=True)
    first = measured(60.0, kept=again)
    assert measured(60.0, kept=again, reading_s=2.0) == measured(1e-9, kept=KeptCalibration(tmp_path, ("a model",)))
    assert {sample.seconds for sample in first} == {1.0}


def test_what_was_kept_is_measured_anew_where_it_takes_longer_now_or_cannot_be_read(tmp_path: Path) -> None:
    kept = KeptCalibration(tmp_path, ("a model",))
    measured(60.0, kept=kept)
    assert {sample.seconds for sample in measured(60.0, kept=kept, reading_s=2.0)} == {2.0}
    (file,) = tmp_path.glob("*/*.json")
    for text in ("", "[[1.0]]", file.read_text().replace("2.0", "-2.0"), file.read_text().replace("2.0", "null")):
        file.write_text(text)
        assert len(measured(1e-9, kept=kept, reading_s=2.0)) == 1


def test_points_go_round_until_the_time_is_up() -> None:
    """Four readings of the clock for each, after those that do not count."""
    samples = measured(duration_s=60.0)
    assert {seconds for _, seconds in samples} == {1.0}
    assert len(samples) == 15  # the last seconds are too short for a longer prompt
    works = [work for work, _ in samples]
    assert works[:2] == [prefill(16), decodes(1, 64)]
    assert works.count(prefill(16)) > 1
    assert max(work.max_decode_context_len for work in works) <= MAX_CONTEXT_LEN


@pytest.mark.parametrize("slowed", [1.0, 12.0, 60.0])
def test_beside_busy_processes_iterations_are_as_long_as_they_compute(slowed: float) -> None:
    """And the start takes up to five times as long: of three readings of the one clock the other has one."""
    computed = measured(60.0)
    beside = measured(60.0, reading_s=slowed, computing_s=1.0)
    assert {sample.seconds for sample in beside} == {1.0}
    assert len(beside) >= len(computed) if slowed < 15.0 else len(beside) < len(computed)


def test_hidden_caches_are_measured_where_there_are_some() -> None:
    assert not any(work.hidden_context_len for work, _ in measured(duration_s=60.0))
    works = [work for work, _ in measured(duration_s=60.0, has_hidden_cache=True)]
    assert [work.hidden_context_len for work in works[:5]] == [0, 0, 128, 512, 0]


@pytest.mark.parametrize("swaps", ["exact", "int8"])
def test_copies_to_the_host_are_measured_in_full_width_tokens(swaps: str) -> None:
    """As many blocks as count for 256 tokens, give or take one, in a second by this clock."""
    copies = [sample for sample in measured(duration_s=60.0, swaps=swaps) if sample.work.is_empty]
    assert len(copies) > 1
    assert all(work.swap_in_tokens == work.swap_out_tokens == 256 for work, _ in copies)
    assert all(seconds == pytest.approx(1.0, rel=0.1) for _, seconds in copies)
    assert learned_from(copies).swap_s(512) == pytest.approx(copies[0].seconds)


def test_a_doubt_about_stragglers_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured(duration_s=20.0)
    assert not caplog.records
    monkeypatch.setattr(measured_iterations, "straggler_in", lambda _: Straggler(doubt="mixed ones took no time"))
    measured(duration_s=20.0)
    assert [record.getMessage() for record in caplog.records] == [
        "long contexts are taken to delay no others: mixed ones took no time"
    ]


def test_it_can_be_left_out() -> None:
    assert measured(duration_s=0.0) == ()
    assert calibration_s(EngineConfig(calibration_s=0.5), SchedulingConfig(policy="aligned_slo")) == 0.5
    aligned = SchedulingConfig(policy="aligned")
    assert calibration_s(EngineConfig(calibration_s=0.5), aligned) == 0.0
    assert calibration_s(EngineConfig(calibration_s=0.5), aligned, BatchingConfig(pack_share=0.9)) == 0.5


def test_a_scheduler_knows_from_the_start_what_was_measured() -> None:
    points = calibration_points(max_requests=32, max_tokens=512, has_hidden_cache=False)
    samples = [Sample(point.work, MACHINE.iteration_s(point.work)) for point in points]
    costs = make_scheduler(SchedulingConfig(), IterationLimits(8, 512), measured=samples).costs
    for work in (prefill(100), prefill(300), decodes(20, 300), decodes(2, 1000)):
        assert costs.iteration_s(work) == pytest.approx(MACHINE.iteration_s(work), rel=0.03)
