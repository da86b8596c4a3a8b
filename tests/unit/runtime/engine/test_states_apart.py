"""States in blocks of their own: the answers of states in each block, and sequences that begin where some are kept."""

from pathlib import Path

import pytest
import torch

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.engine.engine import Engine, NewSequence, StepSlice
from alignedserve.runtime.engine.engine_options import EngineOptions
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.kv.block_storage import BlockStorage
from tests.support.models.tiny_engines import GREEDY, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

FAMILIES = ("granitemoehybrid", "qwen3_next")
SIZE, NUM_BLOCKS = 64, 60
PROMPT = random_tokens(3, 140)


@pytest.fixture(scope="module", params=FAMILIES)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(folder, request.param)
    return tiny_decoder(folder)


class ApartEngine:
    """An engine whose blocks have 64 tokens, or states."""

    def __init__(self, decoder: Decoder) -> None:
        self.layout = decoder.config.layout_apart(decoder.config.block_layout(SIZE, "float32"))
        assert self.layout.state_blocks, "states larger than blocks"
        self.storage = BlockStorage(self.layout, NUM_BLOCKS)
        self.storage.bytes.fill_(0xFF)
        self.engine = Engine(
            model=decoder, storage=self.storage, options=EngineOptions(max_sequences=4, max_context_len=256)
        )
        self.free = [BlockId(block) for block in range(NUM_BLOCKS)][::-1]

    def take(self, count: int) -> tuple[BlockId, ...]:
        return tuple(self.free.pop() for _ in range(count))

    def add(self, name: str, tokens: list[int]) -> None:
        blocks = self.take(self.layout.blocks_for(len(tokens) + 60))
        self.engine.add_sequence(NewSequence(RequestId(name), tuple(tokens), len(tokens), 0, blocks, GREEDY))

    def step(self, **slices: int) -> None:
        self.engine.execute([StepSlice(RequestId(name), count) for name, count in slices.items()])

    def tokens(self, name: str) -> list[int]:
        return list(self.engine.token_ids(RequestId(name)))


def _answer(decoder: Decoder, count: int = 12) -> list[int]:
    """With states in each block."""
    tiny = TinyEngine(decoder)
    tiny.add("a", PROMPT)
    tiny.generate("a", count)
    return tiny.tokens("a")


def test_answers_are_those_of_states_in_each_block(decoder: Decoder) -> None:
    own = ApartEngine(decoder)
    own.add("a", PROMPT)
    own.add("b", random_tokens(4, 50))
    for slices in ({"a": 1}, {"a": 60, "b": 5}, {"b": 30, "a": 1}, {"a": 50, "b": 15}, {"b": 1, "a": 28}):
        own.step(**slices)
    for _ in range(11):
        own.step(a=1, b=1)
    assert own.tokens("a") == _answer(decoder)


@pytest.mark.parametrize("edge", [SIZE, 2 * SIZE])
def test_a_sequence_begins_where_another_left_its_states(decoder: Decoder, edge: int) -> None:
    """In the middle of a slice, or at its end; the other goes on as if nothing had been left."""
    expected, own = _answer(decoder), ApartEngine(decoder)
    kept, num_states = own.take(own.layout.state_blocks), own.layout.state_blocks
    blocks = own.take(own.layout.blocks_for(len(PROMPT) + 60))
    own.engine.add_sequence(NewSequence(RequestId("other"), tuple(PROMPT), len(PROMPT), 0, blocks, GREEDY))
    own.engine.keep_states(RequestId("other"), edge, kept)
    own.step(other=128)
    own.step(other=12)
    again = own.take(own.layout.blocks_for(len(PROMPT) + 60))
    again = (*again[:num_states], *blocks[num_states:][: edge // SIZE], *again[num_states + edge // SIZE :])
    own.engine.write_blocks(again[:num_states], own.engine.read_blocks(kept))
    own.engine.add_sequence(NewSequence(RequestId("a"), tuple(PROMPT), len(PROMPT), edge, again, GREEDY))
    own.step(a=len(PROMPT) - edge)
    for _ in range(11):
        own.step(a=1, other=1)
    assert own.tokens("a") == own.tokens("other") == expected


def test_states_that_are_none_are_computed_again(decoder: Decoder) -> None:
    expected, own = _answer(decoder), ApartEngine(decoder)
    blocks = own.take(own.layout.blocks_for(len(PROMPT) + 60))
    new = NewSequence(RequestId("a"), tuple(PROMPT), len(PROMPT), SIZE, blocks, GREEDY)
    own.engine.add_sequence(new)
    own.step(a=len(PROMPT) - SIZE)
    for _ in range(11):
        own.step(a=1)
    assert own.tokens("a") == expected


def test_no_block_of_tokens_has_states(decoder: Decoder) -> None:
    layout = ApartEngine(decoder).layout
    assert not layout.state_bytes
    assert torch.Size((layout.block_elements,)).numel() == layout.kv_elements
    assert layout.context_bytes >= decoder.config.state_bytes("float32")
