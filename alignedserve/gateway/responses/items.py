"""Items of an input, checked and in one form: as OpenAI lists them, with ids of ours.

An item's id names its response: `msg_<response>i<place>` is an item of its input, `…o<place>` one of its output.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.openai.parsing import parse
from alignedserve.gateway.responses.schemas import (
    FunctionCallItem,
    FunctionCallOutputItem,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ReasoningPart,
    RefusalPart,
    TextPart,
)
from alignedserve.gateway.schema import Schema

Item = dict[str, Any]

_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})", re.ASCII)
_ITEM_ID = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{32})([io])([0-9a-f]{1,6})", re.ASCII)
_SCHEMAS: dict[str, type[Schema]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}
_PART_SCHEMAS: dict[str, type[Schema]] = {
    "input_text": TextPart,
    "output_text": TextPart,
    "refusal": RefusalPart,
    "reasoning_text": ReasoningPart,
    "summary_text": ReasoningPart,
}
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_MESSAGE_PARTS = ("input_text", "output_text", "refusal")
_OUTPUT_PARTS = ("input_text", "output_text")
_CONTENT_PARTS, _SUMMARY_PARTS = ("reasoning_text",), ("summary_text",)
_UNSUPPORTED = (
    *("input_image", "input_file", "input_audio", "computer_screenshot"),
    *("file_search_call", "web_search_call", "computer_call", "computer_call_output", "image_generation_call"),
    *("code_interpreter_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
    *("apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *(
        "mcp_call",
        "custom_tool_call",
        "custom_tool_call_output",
        "compaction",
        "tool_search_call",
        "tool_search_output",
    ),
)


class ItemPlace(NamedTuple):
    """Where a stored item is."""

    response_id: str
    is_input: bool
    index: int


def parsed_response_id(text: str) -> str | None:
    """Return the text if it has the form of a response's id; nothing else ever becomes a key."""
    return text if _RESPONSE_ID.fullmatch(text) else None


def item_id(kind: str, response_id: str, index: int, *, is_input: bool = False) -> str:
    """Return the id of an item, by its type and its place in its response."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}{'i' if is_input else 'o'}{index:x}"


def place_of(text: str) -> ItemPlace | None:
    """Return the place that an item's id names; None for an id that is none of ours."""
    match = _ITEM_ID.fullmatch(text)
    return ItemPlace(f"resp_{match[1]}", match[2] == "i", int(match[3], 16)) if match else None


def parse_items(given: str | Sequence[dict[str, Any]], response_id: str) -> list[Item]:
    """Return the items of an input. Raises InvalidRequest naming the field. References are left as they are."""
    sent = [{"role": "user", "content": given}] if isinstance(given, str) else given
    items = [_parse_item(one, f"input[{place}]") for place, one in enumerate(sent)]
    for place, item in enumerate(items):
        if item["type"] != "item_reference":
            item["id"] = item_id(item["type"], response_id, place, is_input=True)
    return items


def text_of(content: str | Sequence[dict[str, Any]]) -> str:
    """Return the text of an item's parts, each on lines of its own."""
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _parse_item(given: dict[str, Any], path: str) -> Item:
    kind = given.get("type") or ("message" if "role" in given else "item_reference")
    if kind in _UNSUPPORTED:
        raise InvalidRequest(f"{path}.type {kind!r} is not supported.", param=path, code="unsupported_parameter")
    if not isinstance(kind, str) or kind not in _SCHEMAS:
        raise InvalidRequest(f"Invalid value for {path}.type.", param=f"{path}.type", code="invalid_value")
    item = parse(_SCHEMAS[kind], given, path=f"{path}.")
    match item:
        case MessageItem():
            return _message(item, path)
        case FunctionCallOutputItem():
            output = item.output if isinstance(item.output, str) else _parts(item.output, path, "output", _OUTPUT_PARTS)
            return {"id": "", "type": kind, "call_id": item.call_id, "output": output, "status": "completed"}
        case ReasoningItem():
            summary = _parts(item.summary, path, "summary", _SUMMARY_PARTS)
            content = _parts(item.content, path, "content", _CONTENT_PARTS)
            return {"id": "", "type": kind, "summary": summary, "content": content, "status": "completed"}
        case ItemReference():
            return {"type": kind, "id": item.id}
        case _:
            return {"id": ""} | item.model_dump(exclude={"id", "status"}) | {"status": "completed"}


def _message(item: MessageItem, path: str) -> Item:
    kind = "output_text" if item.role == "assistant" else "input_text"
    if isinstance(item.content, str):
        parts = [_text_part(kind, item.content)]
    else:
        parts = _parts(item.content, path, "content", _MESSAGE_PARTS)
    if not parts:
        raise InvalidRequest(f"{path}.content must not be empty.", param=f"{path}.content", code="invalid_value")
    return {"id": "", "type": "message", "role": item.role, "content": parts, "status": "completed"}


def _parts(given: Sequence[dict[str, Any]], path: str, member: str, kinds: Sequence[str]) -> list[Item]:
    parts = []
    for place, one in enumerate(given):
        at = f"{path}.{member}[{place}]"
        kind = one.get("type")
        if kind in _UNSUPPORTED:
            raise InvalidRequest(f"{at}.type {kind!r} is not supported.", param=at, code="unsupported_parameter")
        if kind not in kinds:
            message = f"Invalid value for {at}.type: must be {' or '.join(kinds)}."
            raise InvalidRequest(message, param=f"{at}.type", code="invalid_value")
        part = parse(_PART_SCHEMAS[kind], one, path=f"{at}.")
        parts.append(_text_part(kind, part.text) if isinstance(part, TextPart) else part.model_dump())
    return parts


def _text_part(kind: str, text: str) -> dict[str, Any]:
    """Return a part; annotations and log-probabilities of an answer that was sent back are not kept."""
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})
