"""The benchmark of the kernels at toy size on the fake CUDA: every planner and kernel, as it calls them on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels import benchmark
from benchmarks.kernels.benchmark import KernelBenchmarkSpec, run_kernel_benchmark
from tests.support.fake_cuda import fake_cuda

pytestmark = pytest.mark.slow


def test_every_kernel_by_every_implementation_that_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "chosen_device", lambda _: torch.device("cuda", 0))
    with fake_cuda(pace=1.0, device_bytes=1 << 30):
        report = run_kernel_benchmark(KernelBenchmarkSpec("cuda", "toy", "bfloat16", is_toy=True))
    assert {row.by for row in report.rows if row.kernel == "decode"} == {"torch", "triton", "undivided"}
    pairs: dict[tuple[str, str], set[str]] = {}
    for row in report.rows:
        pairs.setdefault((row.kernel, row.case), set()).add(row.by)
    assert all({"torch", "triton"} <= by for by in pairs.values())
    assert not [why for why in report.left_out if "PyTorch" not in why]
