"""Windows that forget as a GPU's engine computes them: recorded decodes whose rings turn, chunks, copies at edges."""

from pathlib import Path

import pytest
import torch

from alignedserve.core.ids import RequestId
from alignedserve.runtime.attention.backend import TRITON
from alignedserve.runtime.engine.decoder import Decoder
from tests.support.marks import slow
from tests.support.models.ring_engines import RingEngine
from tests.support.models.tiny_engines import BLOCK_SIZE, TinyEngine, capture_nothing, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

PROMPT, OTHER, EDGE = random_tokens(3, 70), random_tokens(4, 21), 40
COUNT = 12  # tokens, over several edges of blocks


@pytest.fixture(scope="module", params=["gpt_oss", *slow("gemma3_text", "llama4_text")])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(folder, request.param)
    return folder


@pytest.fixture
def decoder(folder: Path, device: torch.device) -> Decoder:
    return tiny_decoder(folder, device=device)


def _engine(decoder: Decoder) -> RingEngine:
    """A GPU records graphs; elsewhere what would be recorded is done again."""
    own = RingEngine(decoder, TRITON, None if decoder.device.type == "cuda" else capture_nothing)
    own.engine.record_graphs()
    return own


def _answer(folder: Path, prompt: list[int]) -> list[int]:
    """By a CPU, with all tokens in the blocks."""
    tiny = TinyEngine(tiny_decoder(folder))
    tiny.add("a", prompt)
    tiny.generate("a", COUNT)
    return tiny.tokens("a")


def test_answers_are_those_of_blocks_that_keep_all(folder: Path, decoder: Decoder) -> None:
    """Chunks over an edge and longer than a ring, beside decodes; then decodes alone, one and several, padded."""
    own = _engine(decoder)
    own.add("a", PROMPT)
    own.add("b", OTHER)
    own.step(a=3)
    own.step(a=len(PROMPT) - 3, b=len(OTHER) - 2)
    own.step(a=1, b=2)
    own.add("c", OTHER)
    own.step(c=len(OTHER))
    for _ in range(COUNT - 2):
        own.step(a=1, b=1, c=1)
    own.step(b=1, c=1)
    assert own.tokens("a") == _answer(folder, PROMPT)
    assert own.tokens("b") == own.tokens("c") == _answer(folder, OTHER)


@pytest.mark.parametrize("is_decoding", [False, True])
def test_a_sequence_begins_where_another_left_its_rings(folder: Path, decoder: Decoder, is_decoding: bool) -> None:
    """In the middle of a chunk, or behind a recorded step."""
    own = _engine(decoder)
    kept, num_states = own.take(own.layout.state_blocks), own.layout.state_blocks
    blocks = own.take(own.layout.blocks_for(len(PROMPT) + 60))
    edge = len(PROMPT) + 2 if is_decoding else EDGE
    assert not edge % BLOCK_SIZE
    own.add("other", PROMPT, blocks=blocks)
    own.engine.keep_states(RequestId("other"), edge, kept)
    own.step(other=len(PROMPT))
    for _ in range(COUNT - 1):
        if own.engine.num_computed(RequestId("other")) + 1 == edge:
            own.engine.keep_states(RequestId("other"), edge, kept)
        own.step(other=1)
    answer = _answer(folder, PROMPT)
    assert own.tokens("other") == answer
    again = own.take(own.layout.blocks_for(len(PROMPT) + 60))
    shared = blocks[num_states:][: edge // BLOCK_SIZE]
    own.engine.write_blocks(again[:num_states], own.engine.read_blocks(kept))
    known = answer[: max(len(PROMPT), edge + 1)]
    own.add("a", known, edge, (*again[:num_states], *shared, *again[num_states + len(shared) :]))
    own.step(a=len(known) - edge)
    while len(own.tokens("a")) < len(answer):
        own.step(a=1)
    assert own.tokens("a") == answer
