"""Tool calls of an answer in OpenAI's two shapes."""

from collections.abc import Sequence
from typing import Any

from alignedserve.api.openai.choice_decoder import ChoiceDelta
from alignedserve.api.tools.deltas import ToolCallDelta


def tool_call_chunk(delta: ToolCallDelta) -> dict[str, Any]:
    """Return an entry of `tool_calls` in a chunk."""
    if delta.call_id is None:
        return {"index": delta.call_index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.call_index,
        "id": delta.call_id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }


def function_call_chunk(delta: ToolCallDelta) -> dict[str, Any]:
    """Return `function_call` in a chunk, for clients that sent functions."""
    name = {"name": delta.name} if delta.name is not None else {}
    return {**name, "arguments": delta.arguments}


def whole_tool_calls(deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
    """Return `tool_calls` of a whole message."""
    calls: list[dict[str, Any]] = []
    for delta in (call for choice_delta in deltas for call in choice_delta.tool_calls):
        if delta.call_id is not None:
            call = {"id": delta.call_id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
            calls.append(call)
        calls[delta.call_index]["function"]["arguments"] += delta.arguments
    return calls
