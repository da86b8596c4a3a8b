"""The benchmark of the kernels and its clock, at toy size."""

import dataclasses
import importlib.util
import json

import pytest
import torch

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.device.devices import cuda_obstacle
from benchmarks.kernels import __main__ as command
from benchmarks.kernels.benchmark import KernelBenchmarkSpec, run_kernel_benchmark
from benchmarks.measuring.device_ceilings import TOY_SIZES, measure_device_ceilings
from benchmarks.measuring.device_choice import chosen_device
from benchmarks.measuring.device_timing import DeviceTimer
from benchmarks.measuring.results import DeviceCeilings, KernelReport, KernelRow
from benchmarks.measuring.turns import medians_by_turns

CEILINGS = DeviceCeilings("here", "float32", 100.0, 200.0, 2.0, None, None)
TOY = KernelBenchmarkSpec(device="cpu", shape="toy", dtype="float32", is_toy=True)


def test_the_bound_is_what_takes_longest() -> None:
    assert CEILINGS.bound_s(1e9, 0, is_copy=False) == pytest.approx(0.01)
    assert CEILINGS.bound_s(1e9, 0, is_copy=True) == pytest.approx(0.005)
    assert CEILINGS.bound_s(1e9, 1e12, is_copy=False) == pytest.approx(0.5)


def test_ceilings_of_this_machine() -> None:
    cpu = torch.device("cpu")
    ceilings = measure_device_ceilings(cpu, torch.float32, DeviceTimer(cpu, num_rounds=1, cold_bytes=64), TOY_SIZES)
    assert min(ceilings.read_gb_per_s, ceilings.copy_gb_per_s) > 0.001
    assert max(ceilings.read_gb_per_s, ceilings.copy_gb_per_s) < 10_000.0  # gigabytes, not bytes
    assert ceilings.matrix_tflop_per_s < 1_000.0
    assert ceilings.host_to_device_gb_per_s is ceilings.device_to_host_gb_per_s is None


def test_work_is_timed_by_turns() -> None:
    calls: list[str] = []
    timer = DeviceTimer(torch.device("cpu"), num_rounds=2, cold_bytes=64)
    seconds = timer.by_turns([lambda: calls.append("a"), lambda: calls.append("b")])
    assert calls == ["a", "b"] * 3
    assert len(seconds) == 2
    assert len(medians_by_turns(3, lambda: calls.append("c"))) == 1
    assert calls[6:] == ["c"] * 4


def test_slow_work_has_fewer_rounds() -> None:
    calls: list[int] = []
    DeviceTimer(torch.device("cpu"), num_rounds=50, budget_s=0.0, cold_bytes=64).seconds(lambda: calls.append(1))
    assert len(calls) == 4


@pytest.mark.skipif(cuda_obstacle() is None, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert chosen_device("auto") == chosen_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device cuda cannot be had: "):
        chosen_device("cuda")


def test_bad_specs() -> None:
    with pytest.raises(ConfigError, match="device 'tpu' must be"):
        chosen_device("tpu")
    with pytest.raises(ConfigError, match="shape 'gpt-9' is none of "):
        KernelBenchmarkSpec(shape="gpt-9")
    with pytest.raises(ConfigError, match="num_rounds"):
        KernelBenchmarkSpec(num_rounds=0)


@pytest.fixture(scope="module")
def report() -> KernelReport:
    return run_kernel_benchmark(TOY)


def rows_of(report: KernelReport, kernel: str, by: str) -> dict[str, KernelRow]:
    return {row.case: row for row in report.rows if (row.kernel, row.by) == (kernel, by)}


def test_everything_is_measured_by_what_runs_here(report: KernelReport) -> None:
    assert len(rows_of(report, "decode", "torch")) == 5
    assert len(rows_of(report, "prefill", "torch")) == 3
    kernels = {row.kernel for row in report.rows if row.by == "torch"}
    assert kernels >= {"gather blocks", "residual and norm", "heads placed", "gates", "sampling"}
    for row in report.rows:
        assert 0.1 < row.microseconds < 60e6, row
        assert row.gb_per_s < 10_000.0, row
    assert json.loads(json.dumps(dataclasses.asdict(report)))["ceilings"]["device"] == "CPU"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's interpreter")
@pytest.mark.skipif(cuda_obstacle() is None, reason="there is a GPU: nothing is interpreted")
def test_the_gpu_kernels_are_measured_in_the_interpreter(report: KernelReport) -> None:
    by_triton = {row.kernel for row in report.rows if row.by == "triton"}
    assert by_triton == {row.kernel for row in report.rows}
    assert set(rows_of(report, "decode", "undivided")) == set(rows_of(report, "decode", "triton"))


def test_the_mixed_batch_is_set_against_the_even_one(report: KernelReport) -> None:
    rows = rows_of(report, "decode", "torch")
    mixed, even = rows["3 x 16 + 1 x 112"], rows["4 x 40"]
    assert mixed.against_aligned == pytest.approx(mixed.microseconds / even.microseconds)
    assert [row.against_aligned for row in rows.values()].count(None) == 4


def test_the_command_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.kernels.__main__.run_kernel_benchmark", lambda _: few_rows())
    monkeypatch.setattr("sys.argv", ["kernels", "--device", "cpu"])
    command.main()
    shown = capsys.readouterr().out
    assert "3 x 16 + 1 x 112" in shown
    assert "1.30" in shown
    assert "left out: sampling" in shown


def few_rows() -> KernelReport:
    row = KernelRow("decode", "3 x 16 + 1 x 112", "triton", 12.0, 1.0, 0.1, "read", 0.5, 1.3)
    ceilings = dataclasses.replace(CEILINGS, host_to_device_gb_per_s=50.0, device_to_host_gb_per_s=51.0)
    return KernelReport("toy", "float32", ceilings, [row], ["sampling: does not run"])
