"""`alignedserve profile`: its measurements, and what it refuses."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alignedserve.cli.main import main
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.iteration_points import Chunk, Point, feasible_points
from lab.costmodel.choice import make_cost_model
from lab.profiling.points import CPU_SIZES, GPU_SIZES, PointSizes, fitted_points, held_out_points
from lab.profiling.profile import ProfileResult, ProfileSpec, run_profile, sizes_on
from tests.support.costs import decodes, prefill
from tests.support.marks import each
from tests.support.models.tiny_models import make_tiny_model


def test_a_point_as_work() -> None:
    point = Point("mixed", (Chunk(3, 10, is_last=False),), (5, 20))
    work = point.work
    assert (work.num_prompt_tokens, work.prompt_pairs, work.num_chunks, work.num_sampled) == (3, 36, 1, 2)
    assert (work.decode_context_len, work.max_decode_context_len) == (25, 20)
    assert point.max_context_len == 20
    assert point.num_blocks(16, 4) == 1 + 2 + 2


def test_points_beyond_the_model_or_the_storage_are_left_out() -> None:
    points = [Point("decode", contexts=(100,)), Point("decode", contexts=(100,) * 9), Point("decode", contexts=(600,))]
    assert feasible_points(points, max_context_len=512, num_blocks=60, block_size=16, spare=4) == points[:1]


@each("sizes", [CPU_SIZES, GPU_SIZES])
def test_points_cover_what_has_to_be_told_apart(sizes: PointSizes) -> None:
    fitted = fitted_points(sizes)
    assert {point.kind for point in fitted} == {"prefill", "decode, equal lengths", "decode, mixed lengths", "mixed"}
    held_out = held_out_points(0, 24, sizes)
    assert held_out == held_out_points(0, 24, sizes)
    assert not set(held_out) & set(fitted)
    assert max(point.num_requests for point in (*fitted, *held_out)) == sizes.max_requests


def test_a_gpu_is_measured_at_what_it_serves() -> None:
    sizes = sizes_on(torch.device("cuda:0"))
    assert sizes_on(torch.device("cpu")) == CPU_SIZES
    blocks = {"max_context_len": 16_384, "num_blocks": 40 * 512, "block_size": 16, "spare": 4}  # 40 GiB of an 8B model
    served = feasible_points(fitted_points(sizes), **blocks)
    assert max(point.work.num_prompt_tokens for point in served) == 8192
    assert max(point.work.num_decodes for point in served) == 512
    assert max(point.max_context_len for point in served) >= 8192
    assert len(feasible_points(held_out_points(0, 24, sizes), **blocks)) == 24


@each(
    ("changes", "problem"),
    [
        ({"duration_s": 0.0}, "duration must"),
        ({"num_threads": 0}, "threads must"),
        ({"is_cpu_time": True}, "threads to be 1"),
    ],
)
def test_bad_specs(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ProfileSpec("pocket", **changes)  # type: ignore[arg-type]


def test_an_unknown_model_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="'gpt-17' is neither a folder, a GGUF file nor one of pocket, smollm2, opt"):
        run_profile(ProfileSpec("gpt-17"))


def test_a_tiny_model_is_profiled(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "opt")
    gone: list[float] = []
    result = run_profile(
        ProfileSpec(str(tmp_path), duration_s=0.3, num_threads=1, cache_bytes=4 << 20, is_cpu_time=True), gone.append
    )
    assert gone == sorted(gone)
    assert gone[-1] == 0.3
    assert result.num_threads == 1
    assert result.profile.cost_model().iteration_s(decodes(4, 100)) > 0.0
    assert result.profile.memory_link.bytes_per_s > 1e6


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["alignedserve", "profile", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for target, message in (("/dev/null/x.json", "--output /dev/null: cannot be made"), (str(tmp_path), "'--output'")):
        assert run_command(monkeypatch, "gpt-17", "--output", target) == 2
        assert message in capsys.readouterr().err


def test_results_are_printed_even_if_the_file_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "tiny", "opt")
    target = tmp_path / "new" / "tiny.json"

    def run_and_put_a_folder_there(spec: ProfileSpec, note: Callable[[float], None]) -> ProfileResult:
        target.mkdir()
        return run_profile(replace(spec, duration_s=0.1, cache_bytes=4 << 20), note)

    monkeypatch.setattr("lab.commands.profile.run_profile", run_and_put_a_folder_there)
    assert run_command(monkeypatch, str(tmp_path / "tiny"), "--threads", "1", "--output", str(target)) == 2
    captured = capsys.readouterr()
    assert "microseconds for each" in captured.out
    assert f"--output {target}: cannot be written: Is a directory" in captured.err


@pytest.mark.slow
def test_profiling_pocket_end_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "pocket.json"
    arguments = ["pocket", "--quick", "--threads", "1", "--output", str(target), "--json"]
    assert run_command(monkeypatch, *arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(target.read_bytes())
    assert {"machine", "command", "errors", "samples", "coefficients"} <= set(document)
    assert document["errors"]["prefill"]["median"] < 0.5
    costs = make_cost_model(f"fitted:{target}")
    assert costs.iteration_s(prefill(512)) > 2 * costs.iteration_s(prefill(32))
    assert costs.iteration_s(decodes(32, 500)) < 32 * costs.iteration_s(decodes(1, 500))
