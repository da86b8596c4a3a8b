"""Harmony: answers in channels are divided alike however their text is cut, and conversations keep all they hold."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.api.harmony import HarmonyParser, harmony_effort, harmony_messages, harmony_tools
from tests.unit.api.test_tool_calls import cut

NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>so it is"
PREAMBLE = "<|channel|>commentary<|message|>let me see"
FINAL = "<|channel|>final<|message|>hello <b>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|"}'
TEMPLATE_CALL = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"

Parsed = tuple[str, str, list[tuple[str, str]]]


def parse(pieces: Sequence[str], *, has_tools: bool = True, is_continued: bool = False) -> Parsed:
    """Return content, thought and calls."""
    ids = count()
    parser = HarmonyParser(lambda text: text, lambda: f"id{next(ids)}", has_tools=has_tools, is_continued=is_continued)
    runs = [run for piece in pieces for run in parser.push(piece)] + parser.end()
    assert sum(run.length for run in runs) == len("".join(pieces))
    calls: list[tuple[str, str]] = []
    for delta in (delta for run in runs for delta in run.tool_calls):
        if delta.name is not None:
            assert (delta.call_id, delta.call_index) == (f"id{len(calls)}", len(calls))
            calls.append((delta.name, ""))
        calls[delta.call_index] = (calls[delta.call_index][0], calls[delta.call_index][1] + delta.arguments)
    assert parser.has_calls == bool(calls)
    return "".join(run.content for run in runs), "".join(run.reasoning for run in runs), calls


ANSWERS = [
    (FINAL, ("hello <b>", "", [])),
    (f"{THOUGHT}{NEXT}{FINAL}<|return|>", ("hello <b>", "so it is", [])),
    (f"{THOUGHT}{NEXT}{CALL}<|call|>", ("", "so it is", [("f", '{"a": "<|"}')])),
    (f"{THOUGHT}{NEXT}{TEMPLATE_CALL}", ("", "so it is", [("f", "{}")])),
    (f"{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{CALL}", ("let me see", "so it is", [("f", '{"a": "<|"}')])),
    (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{FINAL}", ("let me see\n\nhello <b>", "so it is\n\nso it is", [])),
    ("no header at all", ("no header at all", "", [])),
    (f"{THOUGHT}<|channel|>final<|message|>a", ("a", "so it is", [])),
    (f"{THOUGHT}{NEXT}<|channel|>fin", ("", "so it is", [])),
    ("", ("", "", [])),
    (" \n", (" \n", "", [])),
]


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
@settings(max_examples=30)
@given(places=st.lists(st.integers(min_value=0), max_size=60))
def test_any_pieces_give_the_same_answer(text: str, expected: Parsed, places: list[int]) -> None:
    assert parse(cut(text, places)) == expected


MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"]
WORDS = [*MARKS, "assistant", "final", "analysis", " to=", "f", "<"]


@settings(max_examples=60)
@given(words=st.lists(st.sampled_from(WORDS), max_size=24), places=st.lists(st.integers(min_value=0), max_size=60))
def test_mixed_up_answers_are_divided_alike(words: list[str], places: list[int]) -> None:
    text = "".join(words)
    assert parse(cut(text, places)) == parse([text])


def test_without_tools_a_message_to_a_function_is_content() -> None:
    assert parse([CALL], has_tools=False) == ('{"a": "<|"}', "", [])


def test_an_answer_that_goes_on_with_a_message() -> None:
    assert parse(["and ", "on"], is_continued=True) == ("and on", "", [])


def call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {}}}


CALLS = [call("1", "f"), call("2", "g")]


def test_a_conversation_as_the_template_shows_it() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "look",
            "reasoning_content": "hm",
            "tool_calls": [call("1", "f"), call("2", "g")],
        },
        {"role": "tool", "tool_call_id": "2", "content": "of g"},
        {"role": "tool", "tool_call_id": "1", "content": "of f"},
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "so", "reasoning_content": "ah"},
    ]
    assert harmony_messages(messages) == [
        {"role": "system", "content": "be kind\n\nbe brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "thinking": "hm\n\nlook", "tool_calls": CALLS[:1]},
        {"role": "tool", "tool_call_id": "1", "content": "of f"},
        {"role": "assistant", "content": "", "tool_calls": CALLS[1:]},
        {"role": "tool", "tool_call_id": "2", "content": "of g"},
        {"role": "assistant", "content": "so", "thinking": "ah"},
    ]


def test_tools_have_descriptions() -> None:
    assert harmony_tools([{"type": "function", "function": {"name": "f"}}])[0]["function"]["description"] == ""


def test_levels_of_effort() -> None:
    efforts = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
    assert [harmony_effort(effort) for effort in efforts] == [None, "low", "low", "medium", "high", "high", "high"]
