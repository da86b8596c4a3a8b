"""Conversations of the Messages API as messages of chat completions."""

from typing import Any

import pytest

from alignedserve.api.anthropic.message_request import Conversation, chat_body_of
from alignedserve.api.anthropic.parsing import BodyParser
from alignedserve.api.anthropic.schemas import CountTokensRequest, InputMessage
from alignedserve.core.errors import InvalidRequest
from tests.support.marks import each

CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": [1, 2]}}
CHAT_CALL = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{"a":[1,2]}'}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def translated(*messages: tuple[Any, Any], system: Any = "") -> Conversation:
    return Conversation(system, [InputMessage(role=role, content=content) for role, content in messages], BodyParser())


def body(**fields: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]} | fields
    return chat_body_of(BodyParser().fields(CountTokensRequest, asked), BodyParser()).fields


def test_a_call_and_its_result() -> None:
    conversation = translated(
        ("user", "add"), ("assistant", [text("so"), CALL]), ("user", [RESULT | {"content": "3"}, text("thanks")])
    )
    assert conversation.messages == [
        {"role": "user", "content": [text("add")]},
        {"role": "assistant", "content": [text("so")], "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "3"},
        {"role": "user", "content": [text("thanks")]},
    ]
    assert conversation.paths == ["messages[0]", "messages[1]", "messages[2]", "messages[2]"]


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, ""),
        ({"content": []}, ""),
        ({"content": [text("one"), text("two")]}, "one\ntwo"),
        ({"content": "it broke", "is_error": True}, "Error: it broke"),
    ],
)
def test_contents_of_results(fields: dict[str, Any], content: str) -> None:
    (message,) = translated(("user", [RESULT | fields])).messages
    assert message["content"] == content


def test_turns_of_one_role_in_a_row_become_one() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    conversation = translated(
        ("user", "a"),
        ("user", "b"),
        ("assistant", [thought, text("c")]),
        ("assistant", [CALL]),
        ("user", [RESULT]),
        system=[text("d")],
    )
    assert conversation.messages == [
        {"role": "system", "content": [text("d")]},
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": [text("c")], "reasoning_content": "hm", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": ""},
    ]
    assert conversation.paths == ["system", "messages[0]", "messages[2]", "messages[4]"]


def test_a_thought_that_only_its_author_can_read_is_left_out() -> None:
    redacted = {"type": "redacted_thinking", "data": "x"}
    messages = translated(("assistant", [redacted]), ("user", "go on")).messages
    assert messages[0] == {"role": "assistant", "content": ""}


def test_tools_and_how_they_may_be_used() -> None:
    function = {"name": "add", "parameters": {"type": "object"}, "description": "Adds."}
    assert body(tools=[TOOL])["tools"] == [{"type": "function", "function": function}]
    choices = {"auto": "auto", "any": "required", "none": "none"}
    for theirs, ours in choices.items():
        assert body(tools=[TOOL], tool_choice={"type": theirs})["tool_choice"] == ours
    named = body(tools=[TOOL], tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert named["parallel_tool_calls"] is False


def test_a_deferred_tool_is_shown_once_a_result_names_it() -> None:
    deferred = TOOL | {"defer_loading": True}
    other = TOOL | {"name": "other"}
    reference = {"type": "tool_reference", "tool_name": "add"}
    found = [
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [RESULT | {"content": [reference]}]},
    ]
    assert [tool["function"]["name"] for tool in body(tools=[deferred, other])["tools"]] == ["other"]
    assert len(body(tools=[deferred, other], messages=found)["tools"]) == 2
    assert "tools" not in body(tools=[deferred])


def test_thinking_and_the_form_of_the_answer() -> None:
    enabled = body(thinking={"type": "enabled", "budget_tokens": 2000})
    assert enabled["thinking_token_budget"] == 2000
    assert enabled["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    disabled = {"enable_thinking": False, "thinking": False}
    assert body(thinking={"type": "disabled"})["chat_template_kwargs"] == disabled
    assert body(thinking={"type": "adaptive"}).keys() == {"model", "messages"}
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        assert body(**fields)["response_format"]["json_schema"]["schema"] == {"type": "object"}
    for theirs, ours in (("low", "low"), ("xhigh", "xhigh"), ("max", "max"), ("high", None)):
        assert body(output_config={"effort": theirs}).get("reasoning_effort") == ours


@each(
    ("chat_name", "own_name"),
    [
        ("messages[3].tool_call_id", "messages[2]"),
        ("messages[0].content", "system"),
        ("messages", "messages"),
        ("tools[1].function.parameters.properties", "tools[2].input_schema.properties"),
        ("tools[0].function.name", "tools[0].name"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("stop", "stop_sequences"),
        ("top_k", "top_k"),
    ],
)
def test_fields_are_blamed_by_the_name_under_which_they_came(chat_name: str, own_name: str) -> None:
    asked = BodyParser().fields(
        CountTokensRequest,
        {
            "model": "tiny",
            "system": "a",
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [RESULT]},
            ],
            "tools": [TOOL, TOOL | {"name": "later", "defer_loading": True}, TOOL | {"name": "other"}],
        },
    )
    with pytest.raises(InvalidRequest) as caught, chat_body_of(asked, BodyParser()).naming_own_fields():
        raise InvalidRequest(f"{chat_name} is wrong.", param=chat_name, code="invalid_value")
    assert (caught.value.param, str(caught.value)) == (own_name, f"{own_name} is wrong.")
