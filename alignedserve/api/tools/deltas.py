"""Parts of an answer as they come: runs of its text, deltas of tool calls and their two shapes in OpenAI's API."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class ToolCallDelta(NamedTuple):
    """A tool call that begins, or more of the arguments of one that has begun."""

    call_index: int  # of the call among those of its choice
    arguments: str = ""  # JSON text, to be appended to what came before
    call_id: str | None = None  # with the first delta of a call, as the name
    name: str | None = None


class OutputRun(NamedTuple):
    """A run of an answer's text: content, thought, text of calls, or none of these."""

    length: int  # characters of the answer
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


def tool_call_chunk(delta: ToolCallDelta) -> dict[str, Any]:
    if delta.call_id is None:
        return {"index": delta.call_index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.call_index,
        "id": delta.call_id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }


def function_call_chunk(delta: ToolCallDelta) -> dict[str, Any]:
    name = {"name": delta.name} if delta.name is not None else {}
    return {**name, "arguments": delta.arguments}


def whole_tool_calls(deltas: Iterable[ToolCallDelta]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.call_id is not None:
            call = {"id": delta.call_id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
            calls.append(call)
        calls[delta.call_index]["function"]["arguments"] += delta.arguments
    return calls
