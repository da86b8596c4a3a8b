"""Tokens that a grammar forces come several in a step, and are those that steps one by one would choose."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps.step import StepOutput
from tests.support.grammars import EOS, PERSON, byte_masks, json_grammar, regex_grammar
from tests.support.models.tiny_engines import BLOCK_SIZE, TinyEngine, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

PROMPT = random_tokens(1, 9)
PLAIN = SamplingParams(temperature=0.0, max_tokens=90, grammar=PERSON)
GRAMMARS = {
    "long keys": json_grammar(
        {
            "type": "object",
            "properties": {key: {"enum": ["ab", "abc", "b"]} for key in ("a_long_name", "another_long_name")},
            "required": ["a_long_name", "another_long_name"],
            "additionalProperties": False,
        }
    ),
    "person": PERSON,
    "choices": json_grammar({"enum": ["a choice of one", "a choice of two", "none"]}),
    "any object": json_grammar({"type": "object"}),
    "array": json_grammar({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 6}),
    "constant": json_grammar({"const": {"always": ["the", "same"]}}),
    "expression": regex_grammar("(abc|true|12){3,9} and the end!"),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, "llama")
    return tiny_decoder(folder)


def steps(engine: TinyEngine, sampling: SamplingParams, name: str = "a") -> Iterator[StepOutput]:
    """Generate until the end of the answer."""
    engine.add(name, PROMPT, sampling, spare_tokens=sampling.max_tokens)
    num_tokens, num_generated, is_done = len(PROMPT), 0, False
    while not is_done:
        output = engine.step(**{name: num_tokens})
        yield output
        num_tokens, num_generated = 1, num_generated + len(output.sampled)
        is_done = output.sampled[-1].token_id == EOS or num_generated == sampling.max_tokens
    engine.engine.remove_sequence(RequestId(name))


def answer(decoder: Decoder, sampling: SamplingParams, *, jumps: bool, attention: str = "auto") -> list[list[int]]:
    """Return the tokens of each step."""
    engine = TinyEngine(decoder, masks=byte_masks(jumps_ahead=jumps), attention=attention)
    return [[token.token_id for token in output.sampled] for output in steps(engine, sampling)]


def flat(parts: list[list[int]]) -> list[int]:
    return [token_id for part in parts for token_id in part]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("kind", GRAMMARS)
def test_answers_are_the_same_in_fewer_steps(decoder: Decoder, kind: str, temperature: float) -> None:
    sampling = replace(PLAIN, grammar=GRAMMARS[kind], temperature=temperature, seed=5)
    one_by_one, jumping = (answer(decoder, sampling, jumps=jumps) for jumps in (False, True))
    assert flat(jumping) == flat(one_by_one)
    assert all(len(part) == 1 for part in one_by_one)
    if kind != "any object":
        assert len(jumping) < 0.8 * len(one_by_one)


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 2.0, "presence_penalty": 1.5, "frequency_penalty": -1.0},
        {"logit_bias": ((100, 50.0),), "temperature": 2.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {"ignore_eos": True, "temperature": 1.0},
        {"min_tokens": 60},
        {"max_tokens": 7},
        {"max_tokens": 8},
        {"stop_token_ids": (3 + ord("n"),)},
    ],
    ids=str,
)
def test_every_option_means_the_same(decoder: Decoder, changes: dict[str, object]) -> None:
    sampling = replace(PLAIN, **changes)  # type: ignore[arg-type]
    one_by_one, jumping = (flat(answer(decoder, sampling, jumps=jumps)) for jumps in (False, True))
    assert jumping == one_by_one
    assert len(jumping) <= sampling.max_tokens


def test_tokens_that_end_an_answer_are_never_in_the_midst_of_a_step(decoder: Decoder) -> None:
    """So whoever counts them sees the end last."""
    ends = (3 + ord("m"), EOS)
    parts = answer(decoder, replace(PLAIN, stop_token_ids=ends), jumps=True)
    assert not [part for part in parts if set(part[:-1]) & set(ends)]
    assert any(part[-1] == ends[0] for part in parts)


def test_answers_with_log_probabilities_come_one_by_one(decoder: Decoder) -> None:
    assert all(len(part) == 1 for part in answer(decoder, replace(PLAIN, num_logprobs=0), jumps=True))


@pytest.mark.parametrize("banned", [{"bad_words": ((3 + ord("m"),),)}, {"allowed_token_ids": (3 + ord("["),)}], ids=str)
def test_a_token_that_is_forced_and_forbidden_fails_its_sequence(decoder: Decoder, banned: dict[str, object]) -> None:
    engine = TinyEngine(decoder, masks=byte_masks(jumps_ahead=True))
    engine.add("a", PROMPT, replace(PLAIN, **banned))  # type: ignore[arg-type]
    output, num_steps = engine.step(a=len(PROMPT)), 1
    while not output.failed and num_steps < 20:
        output, num_steps = engine.step(a=1), num_steps + 1
    assert output.failed == [RequestId("a")]


def test_a_jump_stays_within_the_blocks_of_its_sequence(decoder: Decoder) -> None:
    """A worker gives a sequence the block of its next token, and no more."""
    engine = TinyEngine(decoder, masks=byte_masks(jumps_ahead=True))
    request_id, expected = RequestId("a"), flat(answer(decoder, PLAIN, jumps=False))
    engine.add("a", PROMPT, PLAIN, spare_tokens=0)
    num_slots, num_tokens = len(engine.blocks["a"]) * BLOCK_SIZE, len(PROMPT)
    tokens: list[int] = []
    while len(tokens) < len(expected):
        if engine.engine.num_tokens(request_id) > num_slots:
            engine.engine.append_blocks(request_id, (engine.free_blocks.pop(),))
            num_slots += BLOCK_SIZE
        output = engine.step(a=num_tokens)
        tokens += [token.token_id for token in output.sampled]
        assert output.forced == (() if len(output.sampled) == 1 else ((request_id, len(output.sampled) - 1),))
        assert engine.engine.num_computed(request_id) <= num_slots
        num_tokens = 1
    assert tokens == expected
