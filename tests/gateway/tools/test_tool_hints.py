"""Schemas of tools that are not strict are hints: calls are held to what can be followed, and the rest is named."""

from typing import Any

from tests.gateway.support import error_of, gateway
from tests.gateway.tool_support import HERMES, USER, accepts, grammar_of, model_with, saying
from tests.support.marks import each

HEADER = "x-alignedserve-ignored-fields"


def of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, **more}


TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
# A schema, and the keywords that are not followed.
HINTS: list[tuple[dict[str, Any], str]] = [
    (of(INTEGER | {"format": "uint64", "minimum": 0}), "format"),
    (of(INTEGER | {"format": "int64"}), "format"),
    (of({"type": "number", "format": "double"}), "format"),
    (of(TEXT | {"format": "uri-reference"}), "format"),
    (of(TEXT | {"format": "path"}), "format"),
    (of(TEXT | {"format": "date"}), ""),
    (of(TEXT | {"pattern": "^(?!\\.)(?!.*\\.\\.)[a-z.]+@[a-z.]+$", "format": "email"}), "pattern"),
    (of(TEXT | {"pattern": "^a\\Z"}), "pattern"),
    (of(TEXT | {"pattern": "(a)\\1"}), "pattern"),
    (of(TEXT | {"pattern": "("}), "pattern"),
    (of(TEXT | {"pattern": "^((a{1000}){1000}){1000}$"}), "pattern"),
    (of(TEXT | {"pattern": 7}), "pattern"),
    (of({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {}}), "propertyNames"),
    (of({"type": "object", "patternProperties": {"^a": TEXT, "b$": INTEGER}}), "patternProperties"),
    (of({"type": "object", "patternProperties": {"^a": TEXT}}), ""),
    (of({"type": "object", "additionalProperties": INTEGER}), ""),
    (of({"type": "object", "minProperties": 2}), "minProperties"),
    (of({"type": "object", "properties": {"x": TEXT}, "maxProperties": 1}), "maxProperties"),
    (of({"type": "array", "items": TEXT, "uniqueItems": True}), "uniqueItems"),
    (of({"type": "array", "contains": TEXT}), "contains"),
    (of({"type": "array", "items": TEXT, "minItems": 10**7}), "minItems"),
    (of(TEXT | {"nullable": True}), ""),
    (of(TEXT | {"enum": ["x"], "nullable": True}), ""),
    (of({"$ref": "#/$defs/z", "nullable": True}, **{"$defs": {"z": TEXT}}), "nullable"),
    (of({"anyOf": [TEXT, {"type": "null"}], "default": None, "title": "A"}), ""),
    (of({"anyOf": [{"required": ["a"]}, {"not": {}}]}), "not"),
    (of(TEXT | {"not": {"const": ""}}), "not"),
    (of(TEXT, **{"if": {"required": ["a"]}, "then": {}, "else": {}}), "else if then"),
    (of(TEXT, unevaluatedProperties=False), "unevaluatedProperties"),
    (of(TEXT, dependentRequired={"a": ["b"]}), "dependentRequired"),
    (of(TEXT, dependencies={"a": ["b"]}), "dependencies"),
    (of(INTEGER | {"maximum": 18446744073709551615}), "maximum"),
    (of(INTEGER | {"minimum": -9223372036854775808}), "minimum"),
    (of(INTEGER | {"minimum": 0, "exclusiveMinimum": True}), "exclusiveMinimum"),
    (of({"type": "number", "multipleOf": 0}), "multipleOf"),
    (of(TEXT, oneOf=[{"required": ["a"]}, {"required": ["b"]}]), "oneOf"),
    (of({"oneOf": [TEXT, {"type": "string", "maxLength": 3}]}), "oneOf"),
    (of({"allOf": [TEXT, INTEGER]}), ""),
    (of(TEXT | {"const": "x", "deprecated": True, "examples": ["x"], "contentEncoding": "base64"}), ""),
    (of(TEXT | {"markdownDescription": "x"}), "markdownDescription"),
    (of(TEXT | {"enum": ["x"], "enumDescriptions": ["y"]}), "enumDescriptions"),
    (of(TEXT | {"foo": 1, "x-bar": 2}), "foo"),
    (of(TEXT | {"a word\r\nwith: more": 1}), "?"),
    (of(TEXT | {"xml": {"name": "a"}}), "xml"),
    ({"id": "x", **of(TEXT)}, "id"),
    (of(TEXT, **{"$schema": "http://json-schema.org/draft-04/schema#"}), "$schema"),
    ({"$id": "https://x.example/t", **of({"$ref": "https://x.example/t#/$defs/z"}), "$defs": {"z": TEXT}}, ""),
    (of({"$ref": "#/$defs/nothing"}), "$ref"),
    (of({"$ref": "https://x.example/other"}), "$ref"),
    (of({"$ref": "#anchor"}), "$ref"),
    (of({"$dynamicRef": "#a"}), "$dynamicRef"),
    (of({"$ref": "#/definitions/z"}, definitions={"z": TEXT}), ""),
    (of({"type": "any"}), "type"),
    (of(TEXT | {"required": True}), "required"),
    (of({"type": "array", "items": "string"}), "items"),
    (of(TEXT | {"enum": []}), "enum"),
    (of(TEXT | {"enum": ["a\x00"]}), "enum"),
    (of(TEXT | {"minLength": 9, "maxLength": 2}), ""),
    (of(TEXT, required=["b"]), ""),
    (of({"$ref": "#"}, required=["a"]), "properties"),
    ({"type": "array", "items": TEXT}, "type"),
    ({"type": ["object", "null"], "properties": {"a": TEXT}}, "type"),
    ({"properties": []}, "properties"),
    ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ""),
    ({}, ""),
]


def paths(keywords: str, parent: str) -> set[str]:
    return {parent if keyword == "?" else f"{parent}.{keyword}" for keyword in keywords.split()}


@each(("schema", "keywords"), HINTS)
async def test_what_cannot_be_followed_is_left_out_and_named(schema: dict[str, Any], keywords: str) -> None:
    model = model_with(HERMES)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    async with gateway(saying(model, "hi"), model=model) as served:
        answer = await served.chat(tools=[tool])
    assert answer.status_code == 200, answer.text
    named = answer.headers.get(HEADER, "")
    assert (set(named.split(", ")) if named else set()) == paths(keywords, "tools[].function.parameters")


SCHEMA = of(TEXT | {"format": "path"}, **{"not": {"required": ["b"]}})
CALLS: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
        "tools[{}].function.parameters",
    ),
    (
        "/v1/responses",
        {"input": "hello", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
        "tools[{}].parameters",
    ),
    (
        "/v1/messages",
        {"max_tokens": 9, "messages": [USER], "tools": [{"name": "f", "input_schema": SCHEMA}]},
        "tools[{}].input_schema",
    ),
]


@each(("path", "body", "parent"), CALLS)
async def test_strict_tools_are_refused_by_keyword_on_every_api(path: str, body: dict[str, Any], parent: str) -> None:
    model = model_with(HERMES)
    tool = body["tools"][0]
    strict = tool | ({"function": tool["function"] | {"strict": True}} if "function" in tool else {"strict": True})
    async with gateway(saying(model, "hi"), model=model) as served:
        answer = await served.client.post(path, json={"model": "tiny", **body})
        refused = await served.client.post(path, json={"model": "tiny", **body, "tools": [strict]})
    assert answer.status_code == 200, answer.text
    assert set(answer.headers[HEADER].split(", ")) == paths("format not", parent.format(""))
    assert refused.status_code == 400
    assert f"{parent.format(0)}: the JSON Schema keyword 'format' must be one of" in refused.text


async def test_a_strict_schema_that_cannot_be_compiled_names_its_tool() -> None:
    model = model_with(HERMES)
    bad = {"name": "f", "parameters": of({"type": "string", "pattern": "("}), "strict": True}
    tools = [{"type": "function", "function": function} for function in ({"name": "g"}, bad)]
    async with gateway(saying(model, "hi"), model=model) as served:
        assert error_of(await served.chat(tools=tools), 400)["param"] == "tools[1].function.parameters"


async def test_a_call_is_held_to_the_rest_of_a_hint() -> None:
    schema = of({"enum": ["x"]}, required=["a", "b"], **{"not": {}})
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    model = model_with(HERMES)
    grammar = await grammar_of(model, tools=tools)
    taken = ('{"a": "x"}', '{"a": "y"}', "{}")
    calls = ('<tool_call>\n{"name": "f", "arguments": ' + arguments + "}\n</tool_call>" for arguments in taken)
    assert [accepts(model, grammar, call) for call in calls] == [True, False, False]
