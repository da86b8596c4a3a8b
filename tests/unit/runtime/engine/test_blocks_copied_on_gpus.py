"""Copies of a prefix's blocks on a GPU, behind a step that was launched ahead, on the fake CUDA.

What is copied is the prefix's content, whatever has meanwhile been given the memory of the lists of blocks.
"""

from collections.abc import Iterator

import pytest
import torch

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import Swap, Swaps
from alignedserve.runtime.attention.backend import TRITON
from alignedserve.runtime.device.streams import CudaStreams
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.swap_space import SwapSpace
from alignedserve.runtime.model.model_files import parse_model_config
from alignedserve.runtime.model.weight_files import load_weights
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_cuda.quick_kernels import quick_kernels
from tests.support.fake_cuda.small_copies import small_copies
from tests.support.models.tiny_engines import BLOCK_SIZE, TinyEngine, random_tokens
from tests.support.models.tiny_llama import TINY_LLAMA

DEVICE = torch.device("cuda", 0)
SEEDS = range(12)
SOURCES, TARGETS = list(map(BlockId, range(1, 5))), list(map(BlockId, range(11, 15)))
PROMPT = random_tokens(1, 3 * BLOCK_SIZE, 128)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda(pace=0.0) as fake, quick_kernels():
        yield fake


@pytest.fixture
def streams(fake: FakeCuda) -> CudaStreams:
    return CudaStreams(DEVICE)


@pytest.fixture
def tiny(fake: FakeCuda, streams: CudaStreams) -> TinyEngine:
    """An engine with one sequence, in blocks that are neither sources nor targets."""
    config = parse_model_config(TINY_LLAMA)
    decoder = Decoder(config, load_weights(None, config, torch.float32, DEVICE))
    tiny = TinyEngine(decoder, attention=TRITON, max_sequences=1, num_lent=1, streams=streams)
    tiny.free_blocks = list(map(BlockId, range(20, 60)))
    tiny.add("a", PROMPT)
    tiny.step(a=len(PROMPT))
    return tiny


def copied(fake: FakeCuda, tiny: TinyEngine, seed: int) -> None:
    """Copy blocks behind a step that is launched ahead."""
    fake.machine.random.seed(seed)
    for number in (*SOURCES, *TARGETS):
        tiny.storage.bytes[number].fill_(number)
    torch.cuda.synchronize()
    tiny.step(a=1)
    tiny.engine.write_blocks(TARGETS, tiny.engine.read_blocks(SOURCES))


def test_a_copied_block_holds_what_its_source_holds(fake: FakeCuda, tiny: TinyEngine) -> None:
    for seed in SEEDS:
        copied(fake, tiny, seed)
        tiny.engine.settle()
        assert [tiny.storage.bytes[number, 0].item() for number in TARGETS] == SOURCES


def test_copied_blocks_leave_for_the_host_when_they_are_written(
    fake: FakeCuda, tiny: TinyEngine, streams: CudaStreams
) -> None:
    """A request may be swapped out before its first step."""
    name, num_tokens = RequestId("b"), len(TARGETS) * BLOCK_SIZE
    with small_copies():
        swap_space = SwapSpace(tiny.storage, streams)
    for seed in SEEDS:
        copied(fake, tiny, seed)
        swap_space.perform(Swaps((), (Swap(name, num_tokens, tuple(TARGETS)),), ()))
        swap_space.perform(Swaps((), (), (Swap(name, num_tokens, tuple(SOURCES[::-1])),)))
        torch.cuda.synchronize()
        assert [tiny.storage.bytes[number, 0].item() for number in SOURCES] == SOURCES[::-1]
