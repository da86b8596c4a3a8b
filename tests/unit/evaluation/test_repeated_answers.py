""""""

import json
from typing import Any

from alignedserve.client.openai_client import ClientFailure, ClientFailureKind, CompletionOutcome
from alignedserve.runtime.grammar.constraints import serialize_alone
from alignedserve.runtime.grammar.json_schema import normalize_schema
from lab.evaluation.repeated_answers import MAX_REPEATED, compare_answers, most_disturbed
from lab.evaluation.structured_answers import SCHEMA, is_valid_answer
from lab.loadgen.load_generator import SentRequest
from lab.loadgen.load_plan import LoadRequest
from tests.support.marks import each
from tests.support.random_answers import matcher_of, random_walk


def outcome(text: str, logprobs: tuple[str, ...], *token_times_s: float) -> CompletionOutcome:
    return CompletionOutcome(
        token_times_s=list(token_times_s), text_parts=[text], logprobs=[one.encode() for one in logprobs]
    )


def sent(index: int, *token_times_s: float, failure: ClientFailure | None = None) -> SentRequest:
    one = outcome("a", (), *token_times_s)
    one.failure = failure
    return SentRequest(LoadRequest(index, "demo", 0.0, 1, 1), one, 0.0)


def test_those_with_the_longest_pauses_are_asked_for_again() -> None:
    failed = sent(0, 0.1, 9.0, failure=ClientFailure(ClientFailureKind.TIMEOUT, "late"))
    quick, late_start, interrupted = sent(1, 0.1, 0.2), sent(2, 1.0, 1.1), sent(3, 0.1, 4.0, 4.1)
    chosen = most_disturbed([failed, quick, late_start, interrupted])
    assert [one.request.index for one in chosen] == [3, 2, 1]
    assert len(most_disturbed([quick] * 100)) == MAX_REPEATED


def test_other_words_and_other_probabilities_are_told_apart() -> None:
    under_load = outcome("ab", ("-0.1", "-0.2"), 1.0, 3.5)
    alone = (
        outcome("ab", ("-0.1", "-0.2")),
        outcome("ab", ("-0.1", "-0.20000001")),
        outcome("ac", ("-0.1", "-0.7")),
    )
    compared = compare_answers([(under_load, one) for one in alone])
    assert (compared.num_compared, compared.num_other_words, compared.num_other_logprobs) == (3, 1, 1)
    assert compared.longest_pause_s == 2.5


GOOD: dict[str, Any] = {"kind": "table", "numbers": [7] * 24, "is_complete": True}


def test_the_check_agrees_with_the_schema() -> None:
    matcher = matcher_of(serialize_alone({"json_schema": normalize_schema(SCHEMA)}))
    walks = [random_walk(matcher, seed) for seed in range(20)]
    assert all(is_valid_answer(walk.answer.decode()) for walk in walks if walk.has_ended)
    assert any(walk.has_ended for walk in walks)


@each(
    "change",
    [
        {"kind": "other"},
        {"numbers": [7] * 23},
        {"numbers": [7.5] * 24},
        {"numbers": [1000] * 24},
        {"is_complete": 1},
        {"more": 1},
    ],
)
def test_what_is_not_valid(change: dict[str, Any]) -> None:
    assert is_valid_answer(json.dumps(GOOD))
    assert not is_valid_answer(json.dumps(GOOD | change))
    assert not is_valid_answer(json.dumps(GOOD)[:-1])
