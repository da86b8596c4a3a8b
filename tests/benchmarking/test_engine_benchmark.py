"""The offline benchmark of the engine."""

import dataclasses
import json
from pathlib import Path

import pytest

from alignedserve.core.errors import ConfigError
from benchmarks.engine.benchmark_spec import EngineBenchmarkSpec
from benchmarks.engine.ceilings import chosen_points
from benchmarks.engine.throughput import run_engine_benchmark
from benchmarks.engine.workloads import RequestGroup, parse_workload
from tests.support.models.tiny_models import make_tiny_model


def test_workloads() -> None:
    assert parse_workload("64x32:64, 2x100:1") == (RequestGroup(64, 32, 64), RequestGroup(2, 100, 1))


@pytest.mark.parametrize("text", ["", "64", "64x32", "0x1:1", "1x-1:1", "1x1:1,", "axb:c", "1x1:99999999", "1x²:1"])
def test_bad_workloads(text: str) -> None:
    with pytest.raises(ConfigError, match="workload"):
        parse_workload(text)


def test_a_mixed_workload_runs_to_its_end(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen2")
    spec = EngineBenchmarkSpec(
        model=str(tmp_path),
        groups=parse_workload("5x7:9,2x60:3"),
        dtype="bfloat16",
        max_sequences=3,
        max_step_tokens=16,
        block_size=4,
    )
    result = run_engine_benchmark(spec)
    assert (result.num_requests, result.num_prompt_tokens, result.num_output_tokens) == (7, 155, 51)
    assert 0.0 < result.decode_s + result.prefill_s + result.prepare_s + result.sampling_s <= result.wall_s
    assert result.output_tokens_per_s == pytest.approx(51 / result.wall_s)
    assert json.loads(json.dumps(dataclasses.asdict(result)))["model"] == str(tmp_path)


def test_bad_specs() -> None:
    groups = parse_workload("1x1:1")
    with pytest.raises(ConfigError, match="opt-125m"):
        run_engine_benchmark(EngineBenchmarkSpec(model="gpt-17", groups=groups))
    with pytest.raises(ConfigError, match="block_size"):
        EngineBenchmarkSpec(model="opt-125m", groups=groups, block_size=0)
    with pytest.raises(ConfigError, match="groups"):
        EngineBenchmarkSpec(model="opt-125m", groups=())
    with pytest.raises(ConfigError, match="quantization 'Q9_9' must be int8"):
        EngineBenchmarkSpec("toy", groups, quantization="Q9_9")


def test_a_workload_beyond_the_context_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "opt")
    with pytest.raises(ConfigError, match="512"):
        run_engine_benchmark(EngineBenchmarkSpec(model=str(tmp_path), groups=parse_workload("1x500:13")))


def test_named_workloads() -> None:
    assert parse_workload("w2") == (RequestGroup(60, 32, 64), RequestGroup(4, 1500, 64))
    groups = parse_workload("w4", seed=1)
    assert groups == parse_workload("w4", seed=1) != parse_workload("w4", seed=2)
    prompts = sorted(group.prompt_len for group in groups)
    assert len(groups) == 128
    assert 100 < prompts[64] < 225
    assert max(group.output_len for group in groups) <= 256


def test_the_time_split_is_the_whole_and_the_ceilings_are_of_the_same_products(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    spec = EngineBenchmarkSpec(model=str(tmp_path), groups=parse_workload("3x9:4"), quantization="int8")
    result = run_engine_benchmark(spec)
    parts = ("linear_s", "attention_s", "other_forward_s", "sampling_s", "prepare_s", "waiting_s")
    assert sum(getattr(result, part) for part in parts) == pytest.approx(result.wall_s)
    assert result.gemm_floor_s is not None
    assert result.read_gb_per_s is not None
    assert result.share_of_gemm_floor == pytest.approx(result.gemm_floor_s / result.wall_s)
    assert 0.001 < result.read_gb_per_s < 10_000.0
    assert result.kv_bytes == 3 * result.kv_token_bytes * 16  # 13 tokens each, in blocks of 16


def test_few_of_many_row_numbers_are_timed() -> None:
    assert chosen_points([1, 5, 64]) == [1, 5, 64]
    points = chosen_points(list(range(1, 2000)))
    assert (points[0], points[-1], len(points)) == (1, 1999, 10)
