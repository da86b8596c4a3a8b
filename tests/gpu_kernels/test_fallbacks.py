"""The engine where a GPU kernel does not run: the same tokens by PyTorch's operations, and one line that says so."""

import logging
from typing import Any

import pytest
import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.attention.backend import TORCH, TRITON
from alignedserve.runtime.engine.forward.decoder import Decoder
from benchmarks.measuring import device_timing
from kernels import gpu_dispatch as gpu_choice
from kernels.states.state_rows import state_kernels
from tests.support.models.tiny_engines import TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

pytest.importorskip("triton")

import triton

from alignedserve.runtime.attention import triton_backend
from alignedserve.runtime.attention import triton_backend as gpu_attention

pytestmark = pytest.mark.slow

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for what a GPU would do")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_choice, "_can_launch", {})
    monkeypatch.setattr(gpu_choice, "_reasons", {})


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("mistral")
    make_tiny_model(folder, "mistral_window")
    return tiny_decoder(folder)


def generated(decoder: Decoder, attention: str) -> list[int]:
    tiny = TinyEngine(decoder, attention=attention)
    for name, length in (("a", 9), ("b", 12)):
        tiny.add(name, random_tokens(length, length))
    tiny.step(a=9, b=12)
    for _ in range(4):
        tiny.step(a=1, b=1)
    return tiny.tokens("a") + tiny.tokens("b")


@interpreted
def test_a_kernel_that_does_not_compile_is_named_once(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise triton.CompilationError("x = tl.dot(query, keys)", None, "no such instruction")

    monkeypatch.setattr(triton_backend, "paged_decode", broken)
    with caplog.at_level(logging.WARNING):
        first = generated(decoder, TRITON)
        second = generated(decoder, TRITON)
    assert first == second == generated(decoder, TORCH)
    (warning,) = caplog.records
    assert "attention (float32, 2 query heads of 16 per key head) does not run here" in warning.getMessage()
    assert "CompilationError" in warning.getMessage()


def test_heads_that_no_kernel_is_for(caplog: pytest.LogCaptureFixture, device: torch.device) -> None:
    layout = BlockLayout(block_size=16, num_layers=1, num_kv_heads=1, head_dim=640, dtype="float32")
    assert not gpu_attention.gpu_attention_works(layout, 1, device)
    assert "no kernel for heads of 640 elements, only up to 512" in caplog.text
    assert gpu_attention.gpu_attention_works(
        BlockLayout(block_size=16, num_layers=1, num_kv_heads=1, head_dim=24, dtype="float32"), 1, device
    )


@pytest.mark.parametrize("name", ["state_scans", "state_convolutions"])
def test_states_need_all_their_kernels(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(gpu_choice, "wants_fused_kernels", lambda _: True)
    assert state_kernels(device) is not None
    gpu_choice._can_launch.clear()
    monkeypatch.setattr(f"kernels.gpu.{name}.trial_launch", broken)
    assert state_kernels(device) is None


def test_work_is_timed_by_the_device(device: torch.device) -> None:
    x = torch.ones(1000, device=device)
    timer = device_timing.DeviceTimer(device, num_rounds=3, cold_bytes=0)
    assert 0.0 < timer.seconds(lambda: x.sum()) < 1.0
