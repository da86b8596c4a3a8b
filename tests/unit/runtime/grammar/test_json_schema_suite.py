"""The JSON Schema Test Suite: each of its schemas is refused, naming what is not supported, or followed exactly.

`json_schema_test_suite.json.gz` holds draft 2020-12 and draft 7 of github.com/json-schema-org/JSON-Schema-Test-Suite
(MIT, see the license beside it) at commit 44401e0c: the required tests, and the optional ones of `format`.
"""

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jsonschema import Draft7Validator, Draft202012Validator  # type: ignore[import-untyped]
from llguidance import LLMatcher

from alignedserve.core.errors import InvalidRequest
from alignedserve.runtime.grammar.compiler import failure_of
from alignedserve.runtime.grammar.constraints import serialize_alone
from alignedserve.runtime.grammar.json_schema import normalize_schema
from tests.support.marks import each
from tests.support.random_answers import accepts, is_valid, matcher_of, random_walk

_SUITE = Path(__file__).with_name("json_schema_test_suite.json.gz")
_DRAFTS = {"draft2020-12": Draft202012Validator, "draft7": Draft7Validator}
# jsonschema has Python's `re`, which does not know these classes.
_UNKNOWN_TO_PYTHON = ("\\p{",)


class Group(NamedTuple):
    draft: str
    name: str
    schema: Any
    tests: list[dict[str, Any]]


def groups() -> Iterator[Group]:
    for draft, files in json.loads(gzip.decompress(_SUITE.read_bytes())).items():
        for file, found in files.items():
            for group in found:
                yield Group(draft, f"{file}: {group['description']}", group["schema"], group["tests"])


def matcher_or_refusal(schema: Any) -> LLMatcher | str:
    try:
        matcher = matcher_of(serialize_alone({"json_schema": normalize_schema(schema)}))
    except InvalidRequest as error:
        return str(error)
    return failure_of(matcher) if matcher.is_error() else matcher


@cache
def accepted() -> list[tuple[Group, LLMatcher]]:
    return [
        (group, matcher) for group in groups() if isinstance(matcher := matcher_or_refusal(group.schema), LLMatcher)
    ]


def test_most_schemas_of_supported_keywords_are_accepted() -> None:
    assert len(accepted()) >= 338


def test_no_invalid_instance_is_an_answer() -> None:
    wrong = [
        f"{group.name}: {test['description']}"
        for group, matcher in accepted()
        for test in group.tests
        if not test["valid"] and accepts(matcher, json.dumps(test["data"], ensure_ascii=False))
    ]
    assert wrong == []


def test_most_valid_instances_are_answers() -> None:
    """The others have another order of properties, 1.0 for 1, or a rare form of a format."""
    valid = [
        accepts(matcher, json.dumps(test["data"], ensure_ascii=False))
        for group, matcher in accepted()
        for test in group.tests
        if test["valid"] and not group.name.startswith(("format", "optional"))
    ]
    assert sum(valid) >= 0.93 * len(valid)


def invalid_answers(seeds: range) -> list[str]:
    found = []
    for group, matcher in accepted():
        if any(text in json.dumps(group.schema) for text in _UNKNOWN_TO_PYTHON):
            continue
        for seed in seeds:
            walk = random_walk(matcher, seed)
            if walk.has_ended and not is_valid(group.schema, walk.answer, _DRAFTS[group.draft]):
                found.append(f"{group.name}: {walk.answer!r}")
    return found


def test_random_answers_are_valid() -> None:
    assert invalid_answers(range(3)) == []


@pytest.mark.slow
def test_many_random_answers_are_valid() -> None:
    assert invalid_answers(range(3, 40)) == []


@each(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "'not'"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"uniqueItems": True}, "'uniqueItems'"),
        ({"contains": {}}, "'contains'"),
        ({"propertyNames": {"maxLength": 3}}, "'propertyNames'"),
        ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"unevaluatedProperties": False}, "'unevaluatedProperties'"),
        ({"$dynamicRef": "#x"}, "'$dynamicRef'"),
        ({"$ref": "http://example.com/schema"}, "'$ref'"),
        ({"$ref": "#/$defs/none"}, "'$ref'"),
        ({"properties": {"a": {"$id": "http://example.com/a"}}}, "'$id'"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, "'$schema'"),
        ({"format": "idn-email"}, "'format'"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "'oneOf'"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "'patternProperties'"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "'maxProperties'"),
        ({"minProperties": 2}, "'minProperties'"),
        ({"multipleOf": 12345678899999998}, "'multipleOf'"),
        ({"multipleOf": 99999989}, "'multipleOf'"),
        ({"allOf": [{"multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17)]}, "'multipleOf'"),
        ({"allOf": [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(30)]}, "'pattern'"),
        ({"patternProperties": {f"^k{n}_": {} for n in range(300)}}, "'patternProperties'"),
        ({"const": 2**53 + 1}, "'const'"),
        ({"const": "\x00"}, "'const'"),
        ({"pattern": "(?=a)b"}, "look-around"),
        ({"pattern": "("}, "regular expression"),
        ({"pattern": "[a&&b]"}, "'pattern'"),
        ({"nullable": True}, "'nullable'"),
        ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
        ({"a key\n": True}, "not an identifier"),
        (False, "no finite JSON value"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "nothing matches"),
    ],
)
def test_what_is_not_supported_is_named(schema: Any, named: str) -> None:
    refusal = matcher_or_refusal(schema)
    assert isinstance(refusal, str)
    assert named in refusal


@pytest.mark.parametrize("names", [{"type": "string"}, {}, True])
def test_any_property_names_are_no_constraint(names: Any) -> None:
    assert "propertyNames" not in normalize_schema({"type": "object", "propertyNames": names})


@pytest.mark.parametrize("names", [{"pattern": "^a"}, {"type": "string", "maxLength": 3}, False, 1])
def test_other_property_names_are_refused(names: Any) -> None:
    with pytest.raises(InvalidRequest, match="propertyNames"):
        normalize_schema({"type": "object", "propertyNames": names})


def test_texts_may_be_long() -> None:
    assert normalize_schema({"type": "string", "maxLength": 524_288})["maxLength"] == 524_288
    with pytest.raises(InvalidRequest, match="minLength"):
        normalize_schema({"type": "string", "minLength": 524_288})
