"""Answers under random JSON schemas are valid: those of walks over allowed bytes, and those of the pocket model."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from llguidance import LLMatcher

from alignedserve import LLM, SamplingParams, StructuredOutputs
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import FinishReason
from alignedserve.runtime.grammar.constraints import serialize_alone
from alignedserve.runtime.grammar.json_schema import normalize_schema
from tests.support.random_answers import is_valid, matcher_of, random_walk
from tests.support.random_schemas import RandomSchemas, Schema

pytestmark = pytest.mark.slow


@dataclass(slots=True)
class Counts:
    """What came of schemas and of answers that ended."""

    accepted: int = 0
    valid: int = 0
    invalid: list[tuple[Schema, bytes | str]] = field(default_factory=list)

    def add_answer(self, schema: Schema, answer: bytes | str) -> None:
        if is_valid(schema, answer):
            self.valid += 1
        else:
            self.invalid.append((schema, answer))


def walked(seeds: range) -> Counts:
    counts = Counts()
    for seed, schema, matcher in accepted(seeds, counts):
        for place in range(2):
            walk = random_walk(matcher, seed * 2 + place)
            if walk.has_ended:
                counts.add_answer(schema, walk.answer)
    return counts


def accepted(seeds: range, counts: Counts) -> Iterator[tuple[int, Schema, LLMatcher]]:
    """Yield the random schemas that are accepted."""
    for seed in seeds:
        schema = RandomSchemas(seed).document()
        try:
            matcher = matcher_of(serialize_alone({"json_schema": normalize_schema(schema)}))
        except InvalidRequest:
            continue
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():
            counts.accepted += 1
            yield seed, schema, matcher


def test_answers_to_random_schemas_are_valid() -> None:
    counts = walked(range(1000, 1800))
    assert counts.accepted > 600
    assert counts.valid > 1200
    assert counts.invalid == []


def test_answers_of_a_model_to_random_schemas_are_valid() -> None:
    counts, llm = Counts(), LLM("pocket", memory_bytes=16 * 2**20)
    for seed, schema, _ in accepted(range(30), counts):
        sampling = SamplingParams(max_tokens=96, temperature=1.5, seed=seed)
        (output,) = llm.chat(["repeat: hello"], sampling, structured_outputs=StructuredOutputs(json=schema))
        if output.finish_reason is FinishReason.STOP:
            counts.add_answer(schema, output.text)
    llm.close()
    assert counts.valid > 10
    assert counts.invalid == []
