"""Makes a conversation one that gpt-oss's chat template shows whole.

The template takes thoughts as `thinking`, shows the first call of a message alone, names a result by the call right
before it, and reads a system message at the beginning only; descriptions of tools it takes for granted.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from alignedserve.api.harmony import marks

Message = Mapping[str, Any]
_NEAREST_LEVELS = {"minimal": "low", "xhigh": "high"}


def harmony_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with one system message, and an assistant's calls apart, each with its result behind it."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    shown: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            shown += _assistant_messages(message, messages[place + 1 :])
        elif message["role"] == "user":
            shown.append(dict(message))
    return shown


def harmony_tools(tools: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the tools, each with a description."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def harmony_effort(effort: str) -> str | None:
    """Return the level of an effort; None: the model cannot do without thoughts."""
    return effort if effort in marks.LEVELS else _NEAREST_LEVELS.get(effort)


def _assistant_messages(message: Message, following: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the message, or one for each of its calls with the result, which stands among the following."""
    first = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}
    thought = message.get("reasoning_content", "")
    calls = message.get("tool_calls", ())
    if calls and message["content"] and thought:
        first["content"] = ""
        thought = f"{thought}\n\n{message['content']}"  # beside a call there is a place for only one
    if thought:
        first["thinking"] = thought
    if not calls:
        return [first]
    results = {one["tool_call_id"]: dict(one) for one in takewhile(lambda one: one["role"] == "tool", following)}
    shown: list[dict[str, Any]] = []
    for call in calls:
        calling = first if not shown else {"role": message["role"], "content": ""}
        shown += [{**calling, "tool_calls": [call]}, results[call["id"]]]
    return shown
