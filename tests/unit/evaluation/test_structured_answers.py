import json
from typing import Any

from alignedserve.runtime.grammar.constraints import serialize_alone
from alignedserve.runtime.grammar.json_schema import normalize_schema
from lab.evaluation.structured_answers import SCHEMA, is_valid_answer
from tests.support.marks import each
from tests.support.random_answers import matcher_of, random_walk

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
