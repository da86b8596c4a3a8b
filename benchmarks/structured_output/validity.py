"""Validity of answers under random JSON schemas: those of a walk over allowed bytes, and those of the pocket model.

    python -m benchmarks.structured_output.validity [--schemas 10000] [--answers 3] [--engine 200]

Every schema that is accepted must have only valid answers; an answer that is cut off at its limit counts apart.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher

from alignedserve import LLM, SamplingParams, StructuredOutputs
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import FinishReason
from alignedserve.runtime.grammar.compiler import failure_of
from alignedserve.runtime.grammar.json_schema import normalize_schema
from alignedserve.runtime.grammar.lark import serialize_alone
from benchmarks.structured_output.random_answers import is_valid, matcher_of, random_walk
from benchmarks.structured_output.random_schemas import RandomSchemas, Schema
from benchmarks.support.recording import write_result

_ENGINE_TOKENS = 96


@dataclass(slots=True)
class Counts:
    """What came of schemas and of answers."""

    schemas: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by the reason that the client is given
    valid: int = 0
    cut_off: int = 0
    invalid: list[dict[str, Any]] = field(default_factory=list)

    def add_answer(self, schema: Schema, answer: bytes | str, *, has_ended: bool) -> None:
        """Judge one answer."""
        if not has_ended:
            self.cut_off += 1
        elif is_valid(schema, answer):
            self.valid += 1
        else:
            self.invalid.append({"schema": schema, "answer": str(answer)})


def main() -> None:
    """Judge the answers and write the counts."""
    options = argparse.ArgumentParser()
    options.add_argument("--schemas", type=int, default=10_000)
    options.add_argument("--answers", type=int, default=3)
    options.add_argument("--engine", type=int, default=200)
    given = options.parse_args()
    walks = walked(range(given.schemas), given.answers)
    engine = generated(range(given.engine)) if given.engine else Counts()
    result = {"walks": as_json(walks), "pocket": as_json(engine), "answers_per_schema": given.answers}
    print(result)
    write_result("structured_output_validity", result)


def walked(seeds: range, num_answers: int) -> Counts:
    """Return the counts of random walks."""
    counts = Counts()
    for seed, schema, matcher in accepted(seeds, counts):
        for place in range(num_answers):
            walk = random_walk(matcher, seed * num_answers + place)
            counts.add_answer(schema, walk.answer, has_ended=walk.has_ended)
    return counts


def generated(seeds: range) -> Counts:
    """Return the counts of answers of the pocket model, sampled at a high temperature."""
    counts, llm = Counts(), LLM("pocket", memory_bytes=16 * 2**20)
    for seed, schema, _ in accepted(seeds, counts):
        sampling = SamplingParams(max_tokens=_ENGINE_TOKENS, temperature=1.5, seed=seed)
        (output,) = llm.chat(["repeat: hello"], sampling, structured_outputs=StructuredOutputs(json=schema))
        counts.add_answer(schema, output.text, has_ended=output.finish_reason is FinishReason.STOP)
    llm.close()
    return counts


def accepted(seeds: range, counts: Counts) -> Iterator[tuple[int, Schema, LLMatcher]]:
    """Yield the random schemas that are accepted, and count the others by reason."""
    for seed in seeds:
        schema = RandomSchemas(seed).document()
        counts.schemas += 1
        try:
            matcher = matcher_of(serialize_alone({"json_schema": normalize_schema(schema)}))
        except InvalidRequest as error:
            counts.refused[str(error)] += 1
            continue
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            counts.refused[failure_of(matcher)] += 1
            continue
        counts.accepted += 1
        yield seed, schema, matcher


def as_json(counts: Counts) -> dict[str, Any]:
    """Return the counts for the record."""
    return {
        "schemas": counts.schemas,
        "accepted": counts.accepted,
        "refused": dict(counts.refused.most_common()),
        "answers": counts.valid + len(counts.invalid),
        "valid": counts.valid,
        "cut_off": counts.cut_off,
        "invalid": counts.invalid,
    }


if __name__ == "__main__":
    main()
