"""The self-check of a device through the kernels in Triton's interpreter: it passes, and sees what is wrong."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from alignedserve.core.request import SampledToken
from alignedserve.runtime.attention import triton_backend
from alignedserve.runtime.attention.backend import TRITON
from alignedserve.runtime.device_check import self_check
from alignedserve.runtime.device_check.self_check import CheckPlan, Computer, obstacle_of
from alignedserve.runtime.model.device_kinds import BLOCKS, KINDS, RINGS
from alignedserve.runtime.model.model_files import parse_model_config
from alignedserve.runtime.model.weights import feed_forward_weights
from kernels import gpu_dispatch
from tests.support.marks import slow
from tests.support.models.tiny_engines import capture_nothing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what a GPU would do"),
]

INTERPRETED = Computer(torch.device("cpu"), TRITON, capture_nothing)
SHORT = CheckPlan((40, 9, 3), ((30, 9, 0), (10, 1, 3), (1, 1, 1), (1, 0, 1)), (torch.float32,))


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_dispatch, "_can_launch", {})
    monkeypatch.setattr(gpu_dispatch, "_reasons", {})


def test_kernels_that_compute_what_the_cpu_does_pass() -> None:
    assert obstacle_of(INTERPRETED, SHORT) is None


@pytest.mark.parametrize(
    "kind", ["latent attention", "Mamba-2", "attention sinks", "weights in MXFP4", "weights in NVFP4", BLOCKS, RINGS]
)
def test_a_kind_of_layers_is_computed_as_on_a_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = self_check._compute

    def as_on_a_gpu(computer: Computer, *rest: Any) -> list[SampledToken]:
        with monkeypatch.context() as patched:
            if computer.attention == TRITON:
                patched.setattr(feed_forward_weights, "has_experts_apart", lambda _: False)
                patched.setattr(gpu_dispatch, "wants_fused_kernels", lambda _: True)
            return compute(computer, *rest)

    monkeypatch.setattr(self_check, "_compute", as_on_a_gpu)
    config = parse_model_config(dict(KINDS[kind].fields))
    dtype = torch.bfloat16 if kind in ("latent attention", "Mamba-2") else torch.float32
    computer = replace(INTERPRETED, has_rings=kind == RINGS)
    assert obstacle_of(computer, replace(SHORT, dtypes=(dtype,)), config) is None


@pytest.mark.parametrize("kernel", ["paged_decode", *slow("paged_prefill")])
def test_a_kernel_that_leaves_out_the_first_tokens_is_seen(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = getattr(triton_backend, kernel)

    def short_sighted(*arguments: Any, **form: Any) -> Any:
        return compute(*arguments, **form | {"window": 8})

    monkeypatch.setattr(triton_backend, kernel, short_sighted)
    problem = obstacle_of(INTERPRETED, SHORT)
    assert problem is not None
    assert problem.startswith("in float32 log-probabilities differ from the CPU's by ")


def test_results_that_are_not_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_numbers(queries: Tensor, out: Tensor, *_: Any, **__: Any) -> None:
        out.fill_(float("nan"))

    monkeypatch.setattr(triton_backend, "paged_decode", no_numbers)
    assert obstacle_of(INTERPRETED, SHORT) == "in float32 it has no numbers where the CPU has"


@pytest.mark.slow
def test_a_kernel_that_was_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_dispatch._reasons, "row_norm (torch.float32)", "OSError: no C compiler")
    assert obstacle_of(INTERPRETED, SHORT) == "row_norm (torch.float32) does not run: OSError: no C compiler"
