"""Copies of a prefix's blocks on a GPU, behind a step that was launched ahead, on the fake CUDA.

What is copied is the prefix's content, whatever has meanwhile been given the memory of the lists of blocks.
"""

from collections.abc import Iterator

import pytest
import torch

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.attention.backend import TRITON
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.model.hf_config import parse_model_config
from alignedserve.runtime.model.random_weights import random_weights
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.fake_cuda.quick_kernels import quick_kernels
from tests.support.in_process import TINY_LLAMA
from tests.support.tiny_engines import BLOCK_SIZE, TinyEngine, random_tokens

SEEDS = range(12)
SOURCES, TARGETS = list(map(BlockId, range(1, 5))), list(map(BlockId, range(11, 15)))
PROMPT = random_tokens(1, 3 * BLOCK_SIZE, 128)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda(pace=0.0) as fake, quick_kernels():
        yield fake


def test_a_copied_block_holds_what_its_source_holds(fake: FakeCuda) -> None:
    config, device = parse_model_config(TINY_LLAMA), torch.device("cuda", 0)
    tiny = TinyEngine(
        Decoder(config, random_weights(config, 0, torch.float32, device)), attention=TRITON, max_sequences=1
    )
    tiny.free_blocks = list(map(BlockId, range(20, 60)))
    engine, storage = tiny.engine, tiny.storage
    tiny.add("a", PROMPT)
    slices = [(RequestId("a"), len(PROMPT))]
    for seed in SEEDS:
        fake.machine.random.seed(seed)
        for number in (*SOURCES, *TARGETS):
            storage.bytes[number].fill_(number)
        torch.cuda.synchronize()
        engine.execute(slices)  # and the next step is launched behind it
        slices = [(RequestId("a"), 1)]
        engine.write_blocks(TARGETS, engine.read_blocks(SOURCES))
        engine.settle()
        assert [storage.bytes[number, 0].item() for number in TARGETS] == SOURCES
