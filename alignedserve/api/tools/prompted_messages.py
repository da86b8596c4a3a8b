"""Writes a conversation with tools for a chat template that knows none: all of it becomes text of plain messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from alignedserve.api.tools.formats import ToolFormat

Message = Mapping[str, Any]


def prompted_messages(messages: Sequence[Message], tools: Sequence[Message], form: ToolFormat) -> list[dict[str, Any]]:
    """Return the messages with the tools in the system message, calls as their text and results as the user's."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        shown = _plain_message(message, form)
        if message["role"] == "tool" and plain and plain[-1]["is_result"]:
            plain[-1]["content"] += "\n" + shown["content"]  # templates want users and assistants in turn
        else:
            plain.append({**shown, "is_result": message["role"] == "tool"})
    prompted = [{name: value for name, value in message.items() if name != "is_result"} for message in plain]
    return _with_system_text(prompted, _system_text(tools, form)) if tools else prompted


def _plain_message(message: Message, form: ToolFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return dict(message)
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [(function["name"], json.dumps(function["arguments"], ensure_ascii=False)) for function in functions]
    return {"role": message["role"], "content": message["content"] + form.text_of(calls)}


def _system_text(tools: Sequence[Message], form: ToolFormat) -> str:
    assert form.prompt is not None, "a format without a prompt"
    return form.prompt.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))


def _with_system_text(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
