"""Engines on the fake CUDA whose first step on a GPU would once have been their last."""

import gc
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.messages.iterations import Swap, Swaps
from alignedserve.runtime.attention.backend import AUTO, TRITON
from alignedserve.runtime.device.streams import CudaStreams
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps.step_passes import CudaCapture
from alignedserve.runtime.engine.swap_space import SwapSpace
from alignedserve.runtime.model.model_files import parse_model_config
from alignedserve.runtime.model.weights.weight_loader import assemble_weights
from alignedserve.runtime.model.weights.weight_source import RandomSource
from tests.support.devices.memory_drivers import StandInCuda
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_cuda.quick_kernels import quick_kernels
from tests.support.fake_cuda.small_copies import small_copies
from tests.support.models.tiny_engines import TinyEngine, random_tokens
from tests.support.models.tiny_llama import TINY_LLAMA

DEVICE = torch.device("cuda", 0)
MIXTRAL = {
    **TINY_LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
PROMPT = random_tokens(1, 9, 128)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda(pace=0.3, driver=StandInCuda(largest=0)) as fake, quick_kernels(), small_copies():
        yield fake


class ByName(RandomSource):
    """Random weights that are the same in whatever order they are asked for."""

    @override
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._generator.manual_seed(zlib.crc32(name.encode()))
        own = torch.empty(shape).normal_(0.0, 0.2, generator=self._generator) + (len(shape) == 1)
        return own.to(self.device)


def decoder(config: dict[str, object], device: torch.device | str = "cpu") -> Decoder:
    parsed = parse_model_config(config)
    return Decoder(parsed, assemble_weights(parsed, ByName(0, torch.float32, torch.device(device))))


def generated(tiny: TinyEngine) -> list[int]:
    tiny.add("a", PROMPT)
    tiny.generate("a", 5)
    return tiny.tokens("a")


def test_graphs_of_experts_are_recorded_and_nothing_waits_for_the_routing(fake: FakeCuda) -> None:
    tiny = TinyEngine(decoder(MIXTRAL, DEVICE), attention=TRITON, max_sequences=2)
    tiny.engine.record_graphs()
    assert fake.machine.counts.captures == 2
    before = fake.machine.counts.synchronisations
    assert generated(tiny) == generated(TinyEngine(decoder(MIXTRAL), attention=AUTO))
    assert fake.machine.counts.synchronisations == before + 5  # once for each token


@pytest.fixture
def rarely_collected() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1_000_000)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("fake", "rarely_collected")
def test_graphs_of_an_engine_that_is_gone_are_not_destroyed_within_a_capture() -> None:
    """Where they were, PyTorch would end the process."""
    out = torch.zeros(2, device=DEVICE)

    def work() -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            gc.set_threshold(1)
        assert len([[number] for number in range(9)]) == 9  # enough for a collection
        gc.set_threshold(1_000_000)
        return out.add_(1.0)

    gone: list[Any] = [CudaCapture()(work)]
    gone.append(gone)  # nothing but a collection finds it
    del gone
    CudaCapture()(work)()
    assert gc.isenabled()


def test_a_driver_that_registers_nothing_leaves_the_worker_computing(fake: FakeCuda) -> None:
    """Swapped caches go through page-locked memory of PyTorch's then, and no kernel raises the driver's error."""
    streams = CudaStreams(DEVICE)
    tiny = TinyEngine(decoder(TINY_LLAMA, DEVICE), attention=TRITON, max_sequences=1, streams=streams)
    swap_space = SwapSpace(tiny.storage, streams, host_bytes=1 << 16)
    tokens = generated(tiny)
    blocks, name = tiny.blocks["a"], RequestId("a")
    swap = Swap(name, tiny.engine.num_computed(name), blocks)
    swap_space.perform(Swaps((), (swap,), ()))
    torch.cuda.synchronize()
    tiny.storage.bytes.zero_()
    torch.cuda.synchronize()
    swap_space.perform(Swaps((), (), (swap,)))
    torch.cuda.synchronize()
    tiny.step(a=1)
    again = TinyEngine(decoder(TINY_LLAMA), attention=AUTO)
    assert tokens == generated(again)
    again.step(a=1)
    assert tiny.tokens("a") == again.tokens("a")
