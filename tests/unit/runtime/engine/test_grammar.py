"""Answers under a grammar: valid whatever the sampling, alone in what they change, and ended by the model's own end."""

import json
import re
from dataclasses import replace
from threading import Event
from typing import Any

import pytest

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken, SamplingParams
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.grammar.constraints import StructuredOutputs, part_of, serialize_alone
from alignedserve.runtime.grammar.token_masks import TokenMasks
from tests.support.grammars import EOS, PERSON, byte_masks, encode, text_of
from tests.support.models.tiny_engines import GREEDY, TinyEngine, capture_nothing, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model

PROMPT = random_tokens(1, 9)
RULES = "root ::= s\ns ::= s s | [a-z]"
CONSTRAINED = SamplingParams(temperature=0.0, max_tokens=60, grammar=PERSON)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, "llama")
    return tiny_decoder(folder)


def answer(engine: TinyEngine, name: str, sampling: SamplingParams, *companions: str) -> list[SampledToken]:
    """Generate until the end of the answer."""
    engine.add(name, PROMPT, sampling)
    sampled = engine.generate(name, 1, *companions)
    while sampled[-1].token_id != EOS and len(sampled) < sampling.max_tokens:
        sampled += [one for one in engine.step(**dict.fromkeys((*companions, name), 1)).sampled if one[0] == name]
    return sampled


def ids(sampled: list[SampledToken]) -> list[int]:
    return [token.token_id for token in sampled]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 2.0, "seed": 8, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {"repetition_penalty": 2.0, "presence_penalty": 1.5, "frequency_penalty": -1.0},
        {"logit_bias": tuple((token_id, -100.0) for token_id in range(199))},
        {"ignore_eos": True},
        {"min_tokens": 60},
        {"num_logprobs": 3},
    ],
    ids=str,
)
def test_answers_are_valid_with_every_option(decoder: Decoder, changes: dict[str, object]) -> None:
    sampled = answer(TinyEngine(decoder, masks=byte_masks()), "a", replace(CONSTRAINED, **changes))  # type: ignore[arg-type]
    assert sampled[-1].token_id == EOS
    person = json.loads(text_of(ids(sampled)))
    assert re.fullmatch("[a-z]{2,8}", person["name"])
    assert set(person) == {"name", "is_here", "tags"}


def test_log_probabilities_are_those_of_the_whole_vocabulary(decoder: Decoder) -> None:
    """As with biases: they say what the model thinks, not what it was allowed."""
    plain = TinyEngine(decoder)
    plain.add("a", PROMPT, replace(GREEDY, num_logprobs=3))
    free = plain.generate("a", 1)[0].logprob
    bound = answer(TinyEngine(decoder, masks=byte_masks()), "a", replace(CONSTRAINED, num_logprobs=3))[0].logprob
    assert free is not None
    assert bound is not None
    assert bound.top == free.top
    assert bound.logprob < free.logprob


def test_a_grammar_that_fails_ends_its_own_sequence_alone(decoder: Decoder) -> None:
    engine = TinyEngine(decoder, masks=byte_masks())
    engine.add("good", PROMPT, CONSTRAINED)
    engine.add("bad", PROMPT, replace(CONSTRAINED, grammar="nonsense"))
    engine.add("late", (*PROMPT, *encode("x")), CONSTRAINED, prompt_len=len(PROMPT))
    output = engine.step(good=len(PROMPT), bad=len(PROMPT), late=len(PROMPT) + 1)
    assert [token.request_id for token in output.sampled] == ["good"]
    assert set(output.failed) == {"bad", "late"}
    assert {name: kind for name, (kind, _) in output.reasons.items()} == dict.fromkeys(
        ("bad", "late"), FailureKind.GRAMMAR
    )
    for name in ("bad", "late"):
        engine.engine.remove_sequence(RequestId(name))
    assert engine.step(good=1).sampled


def test_steps_that_are_planned_ahead_have_masks_too(decoder: Decoder) -> None:
    sampling = replace(CONSTRAINED, max_tokens=4)
    expected = ids(answer(TinyEngine(decoder, masks=byte_masks()), "a", sampling))
    ahead = TinyEngine(decoder, masks=byte_masks(), attention="triton", capture=capture_nothing)
    assert ids(answer(ahead, "a", sampling)) == expected


def test_steps_go_on_without_a_sequence_whose_mask_takes_long(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = replace(CONSTRAINED, max_tokens=9, grammar=serialize_alone(part_of(StructuredOutputs(grammar=RULES))))
    expected = ids(answer(TinyEngine(decoder, masks=byte_masks()), "a", sampling))
    may_go_on, write = Event(), TokenMasks._write_heavy

    def write_late(self: TokenMasks, one: Any, heavy: Any) -> bool:
        assert may_go_on.wait(timeout=30)
        return write(self, one, heavy)

    monkeypatch.setattr(TokenMasks, "_write_heavy", write_late)
    engine = TinyEngine(decoder, masks=byte_masks())
    engine.add("late", PROMPT, sampling)
    engine.add("chat", PROMPT, GREEDY)
    sampled = engine.step(late=len(PROMPT), chat=len(PROMPT)).sampled
    assert {token.request_id for token in sampled} == {"late", "chat"}
    output = engine.step(late=1, chat=1)
    assert ([token.request_id for token in output.sampled], output.skipped) == (["chat"], ("late",))
    output = engine.step(late=1)
    assert (output.sampled, output.skipped) == ([], ("late",))
    may_go_on.set()
    while len(engine.tokens("late")) < len(PROMPT) + len(expected):
        engine.step(late=1)
    assert engine.tokens("late")[len(PROMPT) :] == expected
