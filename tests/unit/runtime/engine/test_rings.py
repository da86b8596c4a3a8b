"""Windows that forget: the answers of blocks that keep all, in few blocks; sequences that begin where some are kept.

Rings of a window of 8 tokens have four blocks of 4; contexts here are many times as long.
"""

from functools import cache
from pathlib import Path

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.runtime.attention.backend import AUTO, TORCH
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.kv.state_headers import UNFINISHED, tokens_behind_states
from tests.support.models.ring_engines import MAX_TOKENS, RingEngine
from tests.support.models.tiny_engines import BLOCK_SIZE, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

FAMILIES = ("gemma3_text", "gpt_oss", "cohere2", "llama4_text")
PROMPT = random_tokens(3, 90)
EDGE = 60


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(folder, request.param)
    return tiny_decoder(folder)


@pytest.fixture(params=[AUTO, TORCH])
def attention(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def _answer(decoder: Decoder, attention: str, prompt: tuple[int, ...] = tuple(PROMPT)) -> list[int]:
    """With all tokens in the blocks."""
    tiny = TinyEngine(decoder, attention=attention)
    tiny.add("a", list(prompt))
    tiny.generate("a", 18)  # a ring has 16
    return tiny.tokens("a")


def test_answers_are_those_of_blocks_that_keep_all(decoder: Decoder, attention: str) -> None:
    """In chunks of all lengths: within a block, over an edge, longer than a ring; beside one another and decodes."""
    own, other = RingEngine(decoder, attention), random_tokens(4, 50)
    own.add("a", PROMPT)
    own.add("b", other)
    steps = ({"a": 1}, {"a": 37, "b": 5}, {"b": 18, "a": 3}, {"a": 5, "b": 26}, {"b": 1, "a": 43}, {"a": 1, "b": 1})
    for slices in steps:
        own.step(**slices)
    for _ in range(17):
        own.step(a=1, b=1)
    assert own.tokens("a") == _answer(decoder, attention)
    assert own.tokens("b")[:-1] == _answer(decoder, attention, tuple(other))


@pytest.mark.parametrize("slices", [(EDGE, 30), (73, 17), (59, 2, 29), (90,)])
def test_a_sequence_begins_where_another_left_its_rings(
    decoder: Decoder, attention: str, slices: tuple[int, ...]
) -> None:
    """At the end of a slice, in the middle of a long or a short one; the other goes on as if nothing had been left."""
    own = RingEngine(decoder, attention)
    kept, num_states = own.take(own.layout.state_blocks), own.layout.state_blocks
    blocks = own.take(own.layout.blocks_for(len(PROMPT) + 60))
    own.add("other", PROMPT, blocks=blocks)
    for count in slices:
        before = own.engine.num_computed(RequestId("other"))
        if before < EDGE <= before + count:
            own.engine.keep_states(RequestId("other"), EDGE, kept)
        own.step(other=count)
    again = own.take(own.layout.blocks_for(len(PROMPT) + 60))
    shared = blocks[num_states:][: EDGE // BLOCK_SIZE]
    again = (*again[:num_states], *shared, *again[num_states + len(shared) :])
    own.engine.write_blocks(again[:num_states], own.engine.read_blocks(kept))
    own.add("a", PROMPT, EDGE, again)
    own.step(a=len(PROMPT) - EDGE)
    for _ in range(17):
        own.step(a=1, other=1)
    assert own.tokens("a") == own.tokens("other") == _answer(decoder, attention)


@pytest.mark.parametrize("is_reached", [True, False])
def test_copies_behind_an_edge_are_left_or_marked(decoder: Decoder, attention: str, is_reached: bool) -> None:
    """Ask for a copy behind an edge in the second half of a chunk that is longer than all scratch, and so computed in
    two; or behind an edge that the step does not come to: the copy is marked as unfinished."""
    own = RingEngine(decoder, attention)
    kept = own.take(own.layout.state_blocks)
    header = tokens_behind_states(own.storage)
    header[kept[0]] = 12  # of another sequence, once
    prompt = random_tokens(5, MAX_TOKENS + 20)
    own.add("a", prompt)
    own.engine.keep_states(RequestId("a"), MAX_TOKENS + 16, kept)
    own.step(a=len(prompt) if is_reached else 30)
    assert int(header[kept[0]]) == (MAX_TOKENS + 16 if is_reached else UNFINISHED)


def test_rings_that_are_none_are_computed_again(decoder: Decoder, attention: str) -> None:
    own = RingEngine(decoder, attention)
    own.add("a", PROMPT, EDGE)
    own.step(a=len(PROMPT) - EDGE)
    for _ in range(17):
        own.step(a=1)
    assert own.tokens("a") == _answer(decoder, attention)


def test_a_context_takes_less_than_in_blocks_that_keep_all(decoder: Decoder) -> None:
    whole = decoder.config.block_layout(BLOCK_SIZE, "float32")
    rings = decoder.config.layout_of_rings(whole)
    num_windowed = len(decoder.config.windowed_layers)
    assert rings.num_layers + num_windowed == whole.num_layers
    longer = rings.blocks_for(1000) - rings.blocks_for(500)
    assert longer * rings.block_bytes * whole.num_layers == 125 * whole.block_bytes * rings.num_layers
