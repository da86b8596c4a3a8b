"""Items as messages of a chat."""

from typing import Any

from alignedserve.api.conversation import AnswerSpec, Conversation, ToolChoice, template_messages
from alignedserve.api.responses.bodies import parse_response
from alignedserve.api.responses.items import item_id, parse_items, place_of
from alignedserve.api.responses.request_builder import conversation_of_items, messages_of, response_spec

RESPONSE_ID = "resp_" + "ab" * 16


def messages(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    return template_messages(messages_of(parse_items(list(items), RESPONSE_ID), instructions))


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def called(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}


def test_a_turn_with_calls_is_one_assistant_message() -> None:
    asked = {"role": "user", "content": "go"}
    answer = {"role": "assistant", "content": "wait"}
    output = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "7"}]}
    found = messages(asked, thought("hm"), answer, called("a"), called("b"), output, thought("so"))
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]
    assert (found[1]["reasoning_content"], found[1]["content"]) == ("hm", "wait")
    assert [call["id"] for call in found[1]["tool_calls"]] == ["a", "b"]
    assert found[2] == {"role": "tool", "tool_call_id": "a", "name": "f", "content": "7"}
    assert found[3] == {"role": "assistant", "content": "", "reasoning_content": "so"}


def test_calls_before_their_results_are_one_message_in_any_order() -> None:
    said, output = {"role": "assistant", "content": "wait"}, {"type": "function_call_output", "output": "7"}
    results = [output | {"call_id": "a"}, output | {"call_id": "b"}]
    found = messages(thought("hm"), said, called("a"), said, thought("so"), called("b"), *results, said)
    assert [message["role"] for message in found] == ["assistant", "tool", "tool", "assistant"]
    assert (found[0]["reasoning_content"], found[0]["content"]) == ("hm\nso", "wait\nwait")
    assert [call["id"] for call in found[0]["tool_calls"]] == ["a", "b"]


def test_a_call_that_was_cut_short_is_left_out() -> None:
    said, cut = {"role": "assistant", "content": "wait"}, called("a") | {"arguments": '{"cit', "status": "incomplete"}
    asked = {"role": "user", "content": "go on"}
    found = messages(said, cut, asked, cut, asked)
    assert [message["content"] for message in found] == ["wait", "go on", "", "go on"]  # turns stay
    assert not any("tool_calls" in message for message in found)


def test_answers_that_follow_each_other_stay_apart() -> None:
    found = messages({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, thought("c"))
    assert [message["content"] for message in found] == ["a", "b", ""]


def test_only_the_first_system_messages_join_the_instructions() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    assert [m["content"] for m in messages(system, user, system, instructions="i")] == ["i\n\ns", "u", "s"]


def test_a_thought_may_have_only_a_summary() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    assert messages(item)[0]["reasoning_content"] == "short"


def parsed(**fields: Any) -> tuple[Conversation, AnswerSpec]:
    asked = parse_response({"model": "m", "input": "x", **fields}, None)
    return conversation_of_items(asked, parse_items(asked.input, RESPONSE_ID)), response_spec(asked, RESPONSE_ID)


def test_tools_and_formats() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    found, spec = parsed(tools=[tool], tool_choice=allowed, text={"format": schema}, reasoning={"effort": "low"})
    (offered,) = found.tools
    assert (offered.name, offered.parameters, offered.path) == ("f", {"type": "object"}, "tools[0]")
    assert found.tool_choice == ToolChoice("required", ("f",))
    assert spec.constraint is not None
    assert (spec.constraint.outputs.json, spec.constraint.param) == ({"type": "object"}, "text.format.schema")
    assert found.effort == "low"
    found, _ = parsed(tools=[tool], tool_choice={"type": "function", "name": "f"})
    assert found.tool_choice == ToolChoice("required", ("f",))


def test_functions_of_a_namespace_join_the_others() -> None:
    inner = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    tools = [inner, {"type": "namespace", "name": "ns", "description": "d", "tools": [inner]}]
    names = [tool.name for tool in parsed(tools=tools)[0].tools]
    call = {"type": "function_call", "call_id": "a", "name": "f", "namespace": "ns", "arguments": "{}"}
    [message] = messages(call)
    assert names == ["f", message["tool_calls"][0]["function"]["name"]] == ["f", "ns__f"]


def test_ids_lead_to_their_place() -> None:
    assert place_of(item_id("message", RESPONSE_ID, 300, is_input=True)) == (RESPONSE_ID, True, 300)
    assert place_of("msg_" + "ab" * 16 + "x1") is None
