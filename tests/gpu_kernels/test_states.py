"""Layers with a state as a GPU's engine computes them: recorded decodes, blocks of their own, states left at edges."""

from pathlib import Path

import pytest
import torch

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.attention.backend import TRITON
from alignedserve.runtime.engine.engine import Engine, NewSequence
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.kv.block_storage import BlockStorage
from kernels import gpu_dispatch
from tests.support.models.tiny_engines import GREEDY, TinyEngine, capture_nothing, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

SIZE, NUM_BLOCKS, COUNT = 64, 40, 6
PROMPT = random_tokens(3, 127)


@pytest.mark.parametrize("family", ["granitemoehybrid_dense", "qwen3_5_text"])
def test_answers_are_those_of_a_cpu(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence leaves its states at an edge, another begins there; both decode over the next edge, recorded."""
    make_tiny_model(tmp_path, family)
    tiny = TinyEngine(tiny_decoder(tmp_path))
    tiny.add("a", PROMPT)
    tiny.generate("a", COUNT)
    monkeypatch.setattr(gpu_dispatch, "wants_fused_kernels", lambda _: True)
    decoder = tiny_decoder(tmp_path, device=device)
    layout = decoder.config.layout_apart(decoder.config.block_layout(SIZE, "float32"))
    assert layout.state_blocks, "states larger than blocks"
    storage = BlockStorage(layout, NUM_BLOCKS, device, has_scratch=True)
    storage.bytes.fill_(0xFF)
    capture = None if device.type == "cuda" else capture_nothing
    engine = Engine(
        model=decoder,
        storage=storage,
        capture=capture,
        options=EngineOptions(max_sequences=2, max_context_len=256, attention=TRITON),
    )
    engine.record_graphs()
    free = [BlockId(block) for block in range(NUM_BLOCKS)][::-1]

    def take(count: int) -> tuple[BlockId, ...]:
        return tuple(free.pop() for _ in range(count))

    def add(name: str, blocks: tuple[BlockId, ...], num_cached: int = 0) -> None:
        engine.add_sequence(NewSequence(RequestId(name), tuple(PROMPT), len(PROMPT), num_cached, blocks, GREEDY))

    def step(**counts: int) -> None:
        engine.execute([(RequestId(name), count) for name, count in counts.items()])

    kept, width, num_states = take(layout.state_blocks), layout.blocks_for(200), layout.state_blocks
    first, second = take(width), take(width)
    add("first", first)
    engine.keep_states(RequestId("first"), SIZE, kept)
    step(first=100)
    step(first=len(PROMPT) - 100)
    engine.write_blocks(second[:num_states], engine.read_blocks(kept))
    add("second", (*second[:num_states], first[num_states], *second[num_states + 1 :]), SIZE)
    step(second=len(PROMPT) - SIZE)
    for _ in range(COUNT - 1):
        step(first=1, second=1)
    for name in ("first", "second"):
        assert list(engine.token_ids(RequestId(name))) == tiny.tokens("a")
