"""Layers with a state: the same answers however a prompt is cut and wherever a sequence goes on."""

from pathlib import Path

import pytest
import torch

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.engine.engine import NewSequence
from alignedserve.runtime.engine.forward.decoder import Decoder
from tests.support.models.tiny_engines import BLOCK_SIZE, GREEDY, LogitsProbe, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

FAMILIES = ("lfm2", "granitemoehybrid", "qwen3_next")
PROMPT = random_tokens(3, 30)


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(folder, request.param)
    return tiny_decoder(folder)


def _answer(decoder: Decoder, count: int = 12) -> list[int]:
    tiny = TinyEngine(decoder)
    tiny.add("a", PROMPT)
    tiny.generate("a", count)
    return tiny.tokens("a")


def test_logits_do_not_depend_on_how_a_prompt_is_cut(decoder: Decoder) -> None:
    whole, cut = LogitsProbe(decoder, BLOCK_SIZE), LogitsProbe(decoder, BLOCK_SIZE)
    whole.add("a", PROMPT)
    whole.step(a=30)
    for name in ("a", "b"):
        cut.add(name, PROMPT if name == "a" else random_tokens(4, 30))
    for slices in ({"a": 1}, {"a": 7, "b": 5}, {"b": 1, "a": 1}, {"a": 12}, {"b": 9, "a": 8}, {"a": 1}):
        cut.step(**slices)
    assert torch.equal(whole.logits("a"), cut.logits("a"))


def test_a_sequence_goes_on_in_copies_of_its_blocks(decoder: Decoder) -> None:
    expected, first, second = _answer(decoder), TinyEngine(decoder, seed=1), TinyEngine(decoder, seed=2)
    first.add("a", PROMPT)
    first.generate("a", 5)
    known = first.tokens("a")
    num_cached = len(known) - 1
    blocks = first.blocks["a"][: blocks_for(num_cached, BLOCK_SIZE)]
    own = second.take_blocks(len(known) + 60)
    second.storage.bytes[list(own[: len(blocks)])] = first.storage.bytes[list(blocks)]
    second.engine.add_sequence(NewSequence(RequestId("a"), tuple(known), len(PROMPT), num_cached, own, GREEDY))
    for _ in range(7):
        second.step(a=1)
    assert second.tokens("a") == expected


@pytest.mark.parametrize("num_shared", [8, 10])
def test_a_sequence_begins_behind_blocks_of_another(decoder: Decoder, num_shared: int) -> None:
    """Behind whole blocks it reads the state at their end; behind half a block it computes that half again."""
    expected, tiny = _answer(decoder), TinyEngine(decoder)
    tiny.add("other", [*PROMPT[:num_shared], *random_tokens(9, 12)])
    tiny.generate("other", 3)
    own = list(tiny.take_blocks(len(PROMPT) + 60))
    num_whole, part = divmod(num_shared, BLOCK_SIZE)
    own[:num_whole] = tiny.blocks["other"][:num_whole]
    if part:
        content = tiny.engine.read_blocks([tiny.blocks["other"][num_whole]])
        tiny.engine.write_blocks([BlockId(own[num_whole])], content)
    new = NewSequence(RequestId("a"), tuple(PROMPT), len(PROMPT), num_shared, tuple(own), GREEDY)
    tiny.engine.add_sequence(new)
    tiny.step(a=len(PROMPT) - num_shared)
    for _ in range(11):
        tiny.step(a=1, other=1)
    assert tiny.tokens("a") == expected


def test_blocks_have_room_for_states(decoder: Decoder) -> None:
    layout, config = decoder.config.block_layout(16, "bfloat16"), decoder.config
    keys_and_values = 2 * len(config.attention_layers) * config.kv_width * 16 * 2
    assert layout.block_bytes >= keys_and_values + config.state_bytes("bfloat16")
    assert layout.token_bytes * 16 == layout.block_bytes
