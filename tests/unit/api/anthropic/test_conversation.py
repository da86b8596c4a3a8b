"""Conversations of the Messages API as templates get them, and errors by the client's names."""

from typing import Any

import pytest

from alignedserve.api.anthropic.message_request import (
    BodyParser,
    MessagesRequest,
    conversation_of_message,
    message_spec,
)
from alignedserve.api.conversation import Conversation, template_messages
from alignedserve.core.errors import InvalidRequest
from tests.support.marks import each

CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": [1, 2]}}
CHAT_CALL = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": {"a": [1, 2]}}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALLED = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": [CALL]}]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def parsed(**fields: Any) -> MessagesRequest:
    body = {"model": "tiny", "max_tokens": 7, "messages": [{"role": "user", "content": "hello"}]}
    return BodyParser().fields(MessagesRequest, body | fields)


def translated(*messages: tuple[str, Any], **fields: Any) -> Conversation:
    if messages:
        fields["messages"] = [{"role": role, "content": content} for role, content in messages]
    return conversation_of_message(parsed(**fields), BodyParser())


def test_a_call_and_its_result() -> None:
    conversation = translated(
        ("user", "add"), ("assistant", [text("so"), CALL]), ("user", [RESULT | {"content": "3"}, text("thanks")])
    )
    assert template_messages(conversation.messages) == [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "so", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "add", "content": "3"},
        {"role": "user", "content": "thanks"},
    ]
    paths = [message.path for message in conversation.messages]
    assert paths == ["messages[0]", "messages[1]", "messages[2]", "messages[2]"]


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
    *_, message = translated(("assistant", [CALL]), ("user", [RESULT | fields])).messages
    assert message.text == content


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
    assert template_messages(conversation.messages) == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "add", "content": ""},
    ]
    paths = [message.path for message in conversation.messages]
    assert paths == ["system", "messages[0]", "messages[2]", "messages[4]"]


def test_a_thought_that_only_its_author_can_read_is_left_out() -> None:
    redacted = {"type": "redacted_thinking", "data": "x"}
    messages = translated(("assistant", [redacted]), ("user", "go on")).messages
    assert template_messages(messages)[0] == {"role": "assistant", "content": ""}


def test_tools_and_how_they_may_be_used() -> None:
    function = {"name": "add", "parameters": {"type": "object"}, "description": "Adds."}
    (tool,) = translated(tools=[TOOL]).tools
    assert tool.as_template_tool() == {"type": "function", "function": function}
    for theirs, ours in {"auto": "auto", "any": "required", "none": "none"}.items():
        choice = translated(tools=[TOOL], tool_choice={"type": theirs}).tool_choice
        assert (choice.mode, choice.names) == (ours, None)
    named = translated(tools=[TOOL], tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True})
    assert (named.tool_choice.mode, named.tool_choice.names) == ("required", ("add",))
    assert not named.has_parallel_calls


def test_a_deferred_tool_is_shown_once_a_result_names_it() -> None:
    deferred = TOOL | {"defer_loading": True}
    other = TOOL | {"name": "other"}
    reference = {"type": "tool_reference", "tool_name": "add"}
    found = [*CALLED, {"role": "user", "content": [RESULT | {"content": [reference]}]}]
    assert [tool.name for tool in translated(tools=[deferred, other]).tools] == ["other"]
    assert len(translated(tools=[deferred, other], messages=found).tools) == 2
    assert not translated(tools=[deferred]).tools


def test_thinking_and_the_form_of_the_answer() -> None:
    enabled = translated(thinking={"type": "enabled", "budget_tokens": 2000})
    assert enabled.thinking_budget == 2000
    assert enabled.variables == {"enable_thinking": True, "thinking": True}
    assert translated(thinking={"type": "disabled"}).variables == {"enable_thinking": False, "thinking": False}
    assert translated(thinking={"type": "adaptive"}) == translated()
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form, "effort": "low"}}, {"output_format": form}):
        constraint = message_spec(parsed(**fields)).constraint
        assert constraint is not None
        assert (constraint.outputs.json, constraint.param) == ({"type": "object"}, "output_config.format.schema")
    for theirs, ours in (("low", "low"), ("xhigh", "xhigh"), ("max", "max"), ("high", None)):
        assert translated(output_config={"effort": theirs}).effort == ours
    assert message_spec(parsed()).stop_param == "stop_sequences"


@each(
    ("fields", "param"),
    [
        ({"messages": [*CALLED, {"role": "user", "content": [RESULT | {"tool_use_id": "x"}]}]}, "messages[2]"),
        ({"messages": [*CALLED, CALLED[0]]}, "messages[2]"),
        ({"messages": [CALLED[0], {"role": "assistant", "content": [CALL, CALL]}, CALLED[0]]}, "messages[1]"),
        ({"tools": [TOOL, TOOL | {"name": "b", "defer_loading": True}, TOOL]}, "tools[2].name"),
        ({"tools": [TOOL | {"name": "no name"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_fields_are_blamed_by_the_name_under_which_they_came(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        translated(**fields)
    assert caught.value.param == param
