"""Deltas of an answer as content blocks, by the rules of Anthropic's SDK, which puts them together again."""

from typing import Any

import pytest

from alignedserve.api.anthropic.message_format import ContentBlocks, collect_blocks
from alignedserve.api.openai.choice_decoder import ChoiceDelta
from alignedserve.api.tools.call_parser import ToolCallDelta
from tests.support.lazy_types import LazyType

_EVENT = LazyType("anthropic.types", "RawMessageStreamEvent")


def events(*deltas: ChoiceDelta, shows_thinking: bool = True) -> list[dict[str, Any]]:
    blocks = ContentBlocks(shows_thinking=shows_thinking)
    found = [event for delta in deltas for event in blocks.extend(delta)] + list(blocks.close())
    for event in found:
        assert event["type"].startswith("content_block_")
        _EVENT.check(event)
    return found


def call(call_index: int, arguments: str = "", **first: str) -> ChoiceDelta:
    return ChoiceDelta("", tool_calls=(ToolCallDelta(call_index, arguments, **first),))


ANSWER = (
    ChoiceDelta("", reasoning="so "),
    ChoiceDelta("", reasoning="what"),
    ChoiceDelta("I "),
    ChoiceDelta("add"),
    call(0, call_id="call_1", name="add"),
    call(0, '{"a":'),
    call(0, "1}"),
    call(1, '{"b":2}', call_id="call_2", name="add"),
)


def test_blocks_follow_each_other() -> None:
    found = events(*ANSWER)
    starts = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    open_index = None
    for event in found:
        if event["type"] == "content_block_start":
            assert open_index is None
            open_index = event["index"]
        assert event["index"] == open_index
        if event["type"] == "content_block_stop":
            open_index = None
    assert open_index is None


def test_the_whole_answer() -> None:
    thinking, *others = collect_blocks(events(*ANSWER))
    assert thinking["thinking"] == "so what"
    assert others == [
        {"type": "text", "text": "I add"},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_2", "name": "add", "input": {"b": 2}},
    ]


def test_a_thought_that_is_not_shown_has_the_same_signature() -> None:
    shown, *_ = collect_blocks(events(*ANSWER))
    omitted, *_ = collect_blocks(events(*ANSWER, shows_thinking=False))
    assert omitted == shown | {"thinking": ""}
    assert len(shown["signature"]) == 32


@pytest.mark.parametrize("arguments", ["", '{"a":'])
def test_a_call_without_complete_arguments_has_no_input(arguments: str) -> None:
    (block,) = collect_blocks(events(call(0, arguments, call_id="call_1", name="add")))
    assert block == {"type": "tool_use", "id": "call_1", "name": "add", "input": {}}


def test_an_answer_of_nothing() -> None:
    assert events(ChoiceDelta("")) == []


def test_a_long_text_is_not_copied_for_each_of_its_pieces() -> None:
    num_copied = 0

    class Piece(str):
        __slots__ = ()

        def __radd__(self, before: str) -> str:
            nonlocal num_copied
            num_copied += len(before)
            return str.__add__(before, self)

    (start, *_, stop) = events(ChoiceDelta("a"))
    delta = {"type": "content_block_delta", "index": 0}
    pieces = [delta | {"delta": {"type": "text_delta", "text": Piece("word ")}} for _ in range(200)]
    (block,) = collect_blocks([start, *pieces, stop])
    assert block == {"type": "text", "text": "word " * 200}
    assert num_copied <= len(block["text"])
