"""Constraints as parts of grammars, alone and behind other text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from alignedserve.core.errors import InvalidRequest
from alignedserve.runtime.grammar.constraints import (
    StructuredOutputs,
    part_of,
    serialize,
    serialize_alone,
    special_token,
)
from alignedserve.runtime.grammar.json_schema import normalize_schema
from alignedserve.runtime.grammar.schema_keywords import ANNOTATIONS, FORMATS, READERS
from tests.support.marks import each
from tests.support.random_answers import accepts, is_valid, matcher_of, random_walk

_PAGE = Path(__file__).parents[4] / "docs/structured-output.md"


def answers(outputs: StructuredOutputs, *texts: str) -> list[bool]:
    matcher = matcher_of(serialize_alone(part_of(outputs)))
    assert not matcher.is_error(), matcher.get_error()
    return [accepts(matcher, text) for text in texts]


def test_choices_are_taken_literally() -> None:
    choices = ["a.b", 'quo"te', "back\\slash", "line\nbreak", "snow ☃", "/"]
    assert all(answers(StructuredOutputs(choice=choices), *choices))
    assert answers(StructuredOutputs(choice=choices), "axb", "", "a.ba.b") == [False] * 3


def test_one_text_is_no_list_of_choices() -> None:
    with pytest.raises(InvalidRequest, match="list of texts"):
        part_of(StructuredOutputs(choice="yes"))


def test_a_regular_expression_matches_the_whole_answer() -> None:
    assert answers(StructuredOutputs(regex="[0-9]+|a/b"), "12", "a/b", "12x", "٣") == [True, True, False, False]
    assert answers(StructuredOutputs(regex=r"\d"), "1", "٣") == [True, False]


@pytest.mark.parametrize("regex", ["[a&&b]", "[a-z--b]", "x[^a~~b]", "[[ab]c]", r"\[[[:alpha:]&&a]", "[]&&a]"])
def test_a_class_that_dialects_read_differently_is_refused(regex: str) -> None:
    with pytest.raises(InvalidRequest, match="must be escaped") as refusal:
        part_of(StructuredOutputs(regex=regex))
    assert refusal.value.param == "regex"


def test_what_all_dialects_read_alike_is_taken() -> None:
    assert answers(StructuredOutputs(regex=r"[a\&\&b]"), "a", "&", "b", "c") == [True, True, True, False]
    assert answers(StructuredOutputs(regex="a&&b--~~"), "a&&b--~~", "a") == [True, False]
    assert answers(StructuredOutputs(regex=r"\[\[&&\]\]"), "[[&&]]", "&") == [True, False]
    assert answers(StructuredOutputs(regex="[[:alpha:][:digit:]_]+"), "aB1_", "[:", "é", "a]") == [True] + [False] * 3


def test_grammars_in_both_notations() -> None:
    lark = 'start: NAME ("+" NAME)*\nNAME: /[a-z]+/'
    gbnf = 'root ::= name ("+" name)*\nname ::= [a-z]+'
    for grammar in (lark, gbnf):
        assert answers(StructuredOutputs(grammar=grammar), "a", "ab+c", "a+", "1") == [True, True, False, False]


def test_a_constraint_begins_behind_free_text_and_a_special_token() -> None:
    part = part_of(StructuredOutputs(json={"type": "integer", "minimum": 5, "maximum": 5}))
    skeleton = f"start: THOUGHT {special_token([7])} @answer\nTHOUGHT: /(?s:.*)/"
    matcher = matcher_of(serialize(skeleton, {"answer": part}))
    assert accepts(matcher, "let me see\x075")
    assert not accepts(matcher, "let me see5")
    assert not accepts(matcher, "let me see\x076")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, None),
        ({"regex": "a", "grammar": "b"}, None),
        ({"regex": "a", "disable_any_whitespace": True}, "whitespace_pattern"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "whitespace_pattern"),
        ({"json": {}, "whitespace_pattern": " " * 300}, "whitespace_pattern"),
    ],
)
def test_one_constraint_at_a_time(given: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        StructuredOutputs(**given)
    assert refused.value.param == param


def test_a_name_cannot_come_again_in_another_form() -> None:
    matcher = matcher_of(serialize_alone({"json_schema": normalize_schema({"properties": {"a": {"type": "integer"}}})}))
    assert accepts(matcher, '{"a":1}')
    assert not accepts(matcher, '{"\\u0061":"text"}')
    assert not accepts(matcher, '{"a":1,"a":"text"}')


def test_white_space_ends() -> None:
    matcher = matcher_of(serialize_alone({"json_schema": normalize_schema({"type": "object"})}))
    assert accepts(matcher, '{\n    "a": [1, 2]\n}')
    assert not accepts(matcher, '{  "a":1}')
    assert not accepts(matcher, '{\n\n"a":1}')


class Leaf(BaseModel):
    kind: str = Field(json_schema_extra={"const": "leaf"})
    value: int


class Branch(BaseModel):
    kind: str = Field(json_schema_extra={"const": "branch"})
    parts: list["Leaf | Branch"] = Field(max_length=2)


@pytest.mark.parametrize(
    ("bounds", "within", "beyond"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.05", "0.10"], ["0", "0.0", "-0"]),
        ({"exclusiveMaximum": 0, "minimum": -0.25}, ["-0.1"], ["0", "-0", "-0.0"]),
        ({"exclusiveMaximum": -1, "minimum": -1.5}, ["-1.2"], ["-1", "-1.0"]),
        ({"minimum": 1e15 + 0.5}, ["1000000000000100.5"], ["1000000000000000.4"]),
        ({"maximum": 99999999.12345679}, ["99999999.05"], ["99999999.123456791"]),
    ],
    ids=str,
)
def test_numbers_beyond_a_bound_are_no_answers(bounds: dict[str, Any], within: list[str], beyond: list[str]) -> None:
    number = StructuredOutputs(json={"type": "number"} | bounds)
    assert answers(number, *within, *beyond) == [True] * len(within) + [False] * len(beyond)


def test_tagged_unions_of_pydantic_that_refer_to_themselves() -> None:
    schema = Branch.model_json_schema()
    one_of = json.loads(json.dumps(schema).replace('"anyOf"', '"oneOf"'))
    matcher = matcher_of(serialize_alone({"json_schema": normalize_schema(one_of)}))
    walks = [random_walk(matcher, seed) for seed in range(10)]
    assert all(is_valid(one_of, walk.answer) for walk in walks if walk.has_ended)
    assert accepts(matcher, '{"kind":"branch","parts":[{"kind":"leaf","value":3},{"kind":"branch","parts":[]}]}')


def test_the_page_lists_what_is_supported() -> None:
    named = set(re.findall(r"`([$\w-]+)`", _PAGE.read_text()))
    assert named >= READERS.keys()
    assert named >= ANNOTATIONS
    assert named >= FORMATS.keys()


TAGS: dict[str, Any] = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "object", "maxProperties": 0}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize("wanted", [TAGS, json.dumps(TAGS), TAGS | {"type": "structural_tag"}])
def test_tags_within_free_text(wanted: Any) -> None:
    tags = StructuredOutputs(structural_tag=wanted, disable_any_whitespace=True)
    assert all(answers(tags, "", "text", "x <f=a>{}</f> y", "<f=a>{}</f><f=b>true</f>", "1 < 2", "<f"))
    assert not any(answers(tags, "<f=", "<f=c>", "<f=a>", "<f=b>{}</f>", "x <f=b>true</f> <f="))


@each(
    "change",
    [
        {"structures": []},
        {"structures": TAGS["structures"] * 65},
        {"structures": [{"begin": "<f="}]},
        {"structures": [{"begin": "<g>", "schema": {}, "end": ""}]},
        {"structures": [{"begin": "<f=", "schema": {"not": {}}, "end": ""}]},
        {"triggers": [""]},
        {"triggers": ["<" * 300]},
        {"more": 1},
    ],
)
def test_bad_tags(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        part_of(StructuredOutputs(structural_tag=TAGS | change))


NAMED = {
    "type": "object",
    "properties": {"a": {"const": 1}, "b": {"const": 2}, "é [x": {}, 'q"': {}},
    "required": ["b", "c"],
}


@each(
    ("members", "is_taken"),
    [
        ('"b":2,"c":3', True),
        ('"a":1,"b":2,"c":3,"x":4', True),
        ('"b":2,"é [x":1,"c":3,"é [":4', True),
        ('"b":2,"q\\"":1,"c":3,"":4', True),
        ('"b":2,"c":3,"zoé☃":4', True),
        ('"b":2,"c":3,"a":1', False),  # out of the order
        ('"b":2,"c":3,"a\\"":4', False),
        ('"b":2,"c":3,"ab":4', False),
        ('"b":2,"c":3,"é [xy":4', False),
        ('"b":2,"c":3,"z\\n":4', False),
    ],
)
def test_other_names_begin_with_no_listed_one_and_hold_no_escape(members: str, is_taken: bool) -> None:
    assert answers(StructuredOutputs(json=NAMED), "{" + members + "}") == [is_taken]


OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}, "d": {"$ref": "#/$defs/pair"}},
    "required": ["b", "c"],
    "$defs": {"pair": {"type": "object", "properties": {"x": {"type": "boolean"}, "y": {"type": "null"}}}},
    "additionalProperties": False,
}


@each(
    ("members", "is_taken"),
    [
        ('"b":2,"c":3', True),
        ('"b":2,"c":3,"a":1', True),
        ('"d":{"y":null,"x":true},"b":2,"a":1,"c":3', True),
        ('"d":{"x":true,"y":null},"b":2,"c":3', True),
        ('"b":2,"c":3,"a":2', False),
        ('"b":2,"a":1,"c":3,"a":1', False),
        ('"a":1,"b":2', False),
        ('"c":3,"b":2', False),  # required properties keep the order of the schema
    ],
)
def test_optional_properties_come_anywhere(members: str, is_taken: bool) -> None:
    assert answers(StructuredOutputs(json=OPTIONAL), "{" + members + "}") == [is_taken]


def test_schemas_with_many_orders_keep_that_of_the_schema() -> None:
    names = [f"p{number}" for number in range(40)]
    for required in ([], names[:30]):
        schema = {"type": "object", "properties": dict.fromkeys(names, True), "required": required}
        assert "properties" in normalize_schema(schema)
    deep: dict[str, Any] = {"type": "string", "minLength": 1}
    for _ in range(5):
        deep = {"type": "object", "properties": dict.fromkeys("abcd", deep)}
        assert len(json.dumps(normalize_schema(deep))) < max(20_000, 2 * len(json.dumps(deep)))


def test_other_members_keep_their_schema() -> None:
    schema = {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}, "type": "object"}
    assert answers(StructuredOutputs(json=schema), '{"a":"s","z":1}', '{"z":"s"}') == [True, False]


@each(
    "pattern",
    ["^((a{1000}){1000}){1000}$", "(a{400}){400}", "((ab){9,100}[cd]{1000}){100}", "a{999999}", "(a|b{1000}){1000,}"],
)
def test_a_pattern_that_is_long_with_repetitions_written_out_is_refused(pattern: str) -> None:
    wishes: tuple[dict[str, Any], ...] = (
        {"regex": pattern},
        {"json": {"type": "string", "pattern": pattern}},
        {"json": {"patternProperties": {pattern: {}}}},
    )
    for outputs in wishes:
        with pytest.raises(InvalidRequest, match="repetitions written out"):
            part_of(StructuredOutputs(**outputs))
    with pytest.raises(InvalidRequest, match="longer than"):
        StructuredOutputs(json_object=True, whitespace_pattern=pattern)


def test_repetitions_that_stay_short_are_taken() -> None:
    for pattern in ("(a{100}){100}", r"\{1000\}{9}[{}]{9}", "(ab|c){1,20000}", "a{2}" * 500):
        assert part_of(StructuredOutputs(regex=pattern))
