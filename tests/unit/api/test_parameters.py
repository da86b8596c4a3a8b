"""Calls with parameters between tags: read into JSON however their text is cut."""

import json
from itertools import count

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.api.tools.call_parser import ToolCallParser
from alignedserve.api.tools.formats import FORMATS, check_parameters, text_parameters
from alignedserve.core.errors import InvalidRequest
from tests.unit.api.test_tool_calls import cut

SCHEMA = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "description": "text"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "short": {"type": "string", "maxLength": 3},
        "mixed": {"enum": ["a", 1]},
    },
}


def parse(pieces: list[str], form: str = "qwen3_coder") -> list[tuple[str, str]]:
    ids = count()
    texts = {"f": text_parameters(SCHEMA)}
    parser = ToolCallParser(FORMATS[form], lambda text: text, lambda: f"id{next(ids)}", texts)
    calls: list[tuple[str, str]] = []
    for delta in (delta for piece in pieces for run in parser.push(piece) for delta in run.tool_calls):
        calls += [(delta.name, "")] if delta.name is not None else []
        calls[delta.call_index] = (calls[delta.call_index][0], calls[delta.call_index][1] + delta.arguments)
    return calls


def written(**values: str) -> str:
    parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


@settings(max_examples=30)
@given(
    code=st.text().filter(lambda text: "\r" not in text and "</parameter>" not in text and "\n</par" not in text),
    places=st.lists(st.integers(min_value=0), max_size=60),
)
def test_any_pieces_give_the_same_arguments(code: str, places: list[int]) -> None:
    text = written(code=code, days=" 3", unit="C") + "\n" + written()
    (name, arguments), second = parse(cut(text, places))
    assert (name, json.loads(arguments)) == ("f", {"code": code, "days": 3, "unit": "C"})
    assert second == ("f", "{}")


def test_texts_come_as_they_are_written() -> None:
    assert parse([written(code="5", days="5", short='"5"', other="so")]) == [
        ("f", '{"code": "5", "days": 5, "short": "5", "other": "so"}')
    ]
    assert parse(["<tool_call>\n<function=f>\n<parameter=code>\nhalf\n of"]) == [("f", '{"code": "half\\n of')]


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "[" * 100_000])
def test_what_no_client_could_read_as_json_is_a_text(value: str) -> None:
    ((_, arguments),) = parse([written(days=value)])
    assert orjson.loads(arguments) == {"days": value}


def test_which_parameters_are_texts() -> None:
    assert text_parameters(SCHEMA) == {"code": None, "unit": ("C", "F")}


@pytest.mark.parametrize(
    "schema", [{"anyOf": []}, {"properties": {"a>b": {}}}, {"properties": {}, "required": ["a"]}, {"$ref": "#/$defs/a"}]
)
def test_what_parameters_cannot_be_held_to(schema: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        check_parameters(schema)


def glm(name: str, between: str = "\n", **values: str) -> str:
    written = [f"<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>" for key, value in values.items()]
    return f"<tool_call>{name}{between}{''.join(one + between for one in written)}</tool_call>"


@settings(max_examples=20)
@given(
    code=st.text().filter(lambda text: "\r" not in text and "</arg_value>" not in text and "</arg" not in text),
    between=st.sampled_from(["\n", ""]),  # newer models leave it out
    places=st.lists(st.integers(min_value=0), max_size=60),
)
def test_calls_of_glm_in_any_pieces(code: str, between: str, places: list[int]) -> None:
    text = glm("f", between, code=code, days="3", unit="C") + "\n" + glm("stop", between)
    (name, arguments), second = parse(cut(text, places), "glm45")
    assert (name, json.loads(arguments)) == ("f", {"code": code, "days": 3, "unit": "C"})
    assert second == ("stop", "{}")
