"""Windows that forget as a GPU's engine computes them: recorded decodes whose rings turn, chunks, copies at edges."""

import random
from pathlib import Path

import pytest
import torch

from alignedserve.core.ids import RequestId
from alignedserve.runtime.attention.backend import TRITON
from alignedserve.runtime.engine.engine import NewSequence
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps import step as late_states
from tests.support.marks import slow
from tests.support.models.ring_engines import RingEngine
from tests.support.models.tiny_engines import (
    BLOCK_SIZE,
    GREEDY,
    TinyEngine,
    capture_nothing,
    random_tokens,
    tiny_decoder,
)
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


@pytest.fixture(params=[True, *slow(False)])
def launches_ahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def recomputing(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Return the log, which tells of tokens that are computed again."""
    caplog.set_level("INFO", logger=late_states.__name__)
    return caplog


def _engine(decoder: Decoder, launches_ahead: bool) -> RingEngine:
    """A GPU records graphs; elsewhere what would be recorded is done again."""
    capture = None if decoder.device.type == "cuda" else capture_nothing
    own = RingEngine(decoder, TRITON, capture, launches_ahead=launches_ahead, num_lent=9)
    own.engine.record_graphs()
    return own


def _answer(folder: Path, prompt: list[int]) -> list[int]:
    """By a CPU, with all tokens in the blocks."""
    tiny = TinyEngine(tiny_decoder(folder))
    tiny.add("a", prompt)
    tiny.generate("a", COUNT)
    return tiny.tokens("a")


def test_answers_are_those_of_blocks_that_keep_all(folder: Path, decoder: Decoder, launches_ahead: bool) -> None:
    """Chunks over an edge and longer than a ring, beside decodes; then decodes alone, one and several, padded."""
    own = _engine(decoder, launches_ahead)
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
def test_a_sequence_begins_where_another_left_its_rings(
    folder: Path, decoder: Decoder, launches_ahead: bool, is_decoding: bool, recomputing: pytest.LogCaptureFixture
) -> None:
    """In the middle of a chunk, or behind a recorded step, which may have been launched before that was asked for."""
    own = _engine(decoder, launches_ahead)
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
    assert not recomputing.messages


def test_sequences_come_and_go(
    folder: Path, decoder: Decoder, launches_ahead: bool, recomputing: pytest.LogCaptureFixture
) -> None:
    """Drop steps that were launched ahead, or ask for a part of them; bring sequences back with copies of their rings,
    which such a step may have written. None of them computes tokens again."""
    rng, own = random.Random(5), _engine(decoder, launches_ahead)
    prompts = {
        name: random_tokens(seed, length) for seed, (name, length) in enumerate((("a", 33), ("b", 9), ("c", 50)))
    }
    answers = {name: _answer(folder, prompt) for name, prompt in prompts.items()}
    blocks = {name: own.take(own.layout.blocks_for(80)) for name in prompts}
    for name, prompt in prompts.items():
        own.add(name, prompt, blocks=blocks[name])
    spare, num_states = own.take(own.layout.state_blocks), own.layout.state_blocks
    left, num_ahead = {name: len(prompt) for name, prompt in prompts.items()}, 0
    while left:
        chosen = [name for name in left if rng.random() < 0.8] or list(left)
        slices = {name: min(left[name], rng.choice((1, 4, 30))) for name in chosen}
        num_ahead += own.step(**slices).times.is_ahead
        for name, count in slices.items():
            left[name] = max(left[name] - count, 1)
            if len(own.tokens(name)) == len(answers[name]):
                del left[name]
        if left and rng.random() < 0.4:
            name = rng.choice(list(left))
            known, num_computed = own.tokens(name), own.engine.num_computed(RequestId(name))
            own.engine.remove_sequence(RequestId(name))
            own.engine.write_blocks(spare, own.engine.read_blocks(blocks[name][:num_states]))
            spare, blocks[name] = blocks[name][:num_states], (*spare, *blocks[name][num_states:])
            own.engine.add_sequence(
                NewSequence(RequestId(name), tuple(known), len(prompts[name]), num_computed, blocks[name], GREEDY)
            )
            own.step(**{name: left[name]})
            left[name] = 1
            if len(own.tokens(name)) == len(answers[name]):
                del left[name]
    assert {name: own.tokens(name) for name in prompts} == answers
    assert (num_ahead > 5) is launches_ahead
    assert not recomputing.messages
