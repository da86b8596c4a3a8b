"""Items of an input, checked and in one form: as OpenAI lists them, with ids of ours.

An item's id names its response: `msg_<response>i<place>` is an item of its input, `…o<place>` one of its output."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from alignedserve.api.conversation import NamedPicture
from alignedserve.api.errors import refuse, refuse_unsupported
from alignedserve.api.openai.parsing import parse
from alignedserve.api.responses.bodies import (
    FunctionCallItem,
    FunctionCallOutputItem,
    ItemImagePart,
    ItemReference,
    ItemTextPart,
    MessageItem,
    ReasoningItem,
    ReasoningPart,
    RefusalPart,
    known_fields,
)
from alignedserve.api.schema import IgnoredFields, Schema
from alignedserve.core.errors import InvalidRequest

Item = dict[str, Any]

_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})", re.ASCII)
_CONVERSATION_ID = re.compile(r"conv_[0-9a-f]{32}", re.ASCII)
_ITEM_ID = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{32})([io])([0-9a-f]{1,6})", re.ASCII)
_SCHEMAS: dict[str, type[Schema]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_OUTPUT_PARTS: dict[str, type[Schema]] = {"input_text": ItemTextPart, "output_text": ItemTextPart}
_MESSAGE_PARTS = _OUTPUT_PARTS | {"refusal": RefusalPart}
_USER_PARTS = _MESSAGE_PARTS | {"input_image": ItemImagePart}
_SUMMARY_PARTS: dict[str, type[Schema]] = {"summary_text": ReasoningPart}
_THOUGHTS: dict[str, type[Schema]] = {"reasoning_text": ReasoningPart}
_UNSUPPORTED = (
    *("input_file", "input_audio", "computer_screenshot"),
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
    place: int


def parsed_response_id(text: str) -> str | None:
    """Return the text if it has the form of a response's id; nothing else ever becomes a key."""
    return text if _RESPONSE_ID.fullmatch(text) else None


def is_conversation_id(text: str) -> bool:
    """Return whether the text has the form of a conversation's id; nothing else ever becomes a key."""
    return _CONVERSATION_ID.fullmatch(text) is not None


def item_id(kind: str, response_id: str, index: int, *, is_input: bool = False) -> str:
    """Return the id of an item, by its type and its place in its response."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}{'i' if is_input else 'o'}{index:x}"


def place_of(text: str) -> ItemPlace | None:
    """Return the place that an item's id names; None for an id that is none of ours."""
    match = _ITEM_ID.fullmatch(text)
    return ItemPlace(f"resp_{match[1]}", match[2] == "i", int(match[3], 16)) if match else None


def parse_items(
    field: str | Sequence[dict[str, Any]],
    response_id: str,
    ignored: IgnoredFields | None = None,
    *,
    param: str = "input",
) -> list[Item]:
    """Return the items of a field. Raises InvalidRequest naming the field. References are left as they are.

    `response_id`: its hex digits, or others, are in their ids. `ignored`: see `parse`."""
    parser = _ItemParser(ignored)
    sent = [{"role": "user", "content": field}] if isinstance(field, str) else field
    items = [parser.parse(raw_item, f"{param}[{index}]") for index, raw_item in enumerate(sent)]
    for index, item in enumerate(items):
        if item["type"] != "item_reference":
            item["id"] = item_id(item["type"], response_id, index, is_input=True)
    return items


def text_of(content: str | Sequence[dict[str, Any]]) -> str:
    """Return the text of an item's parts, each on lines of its own; pictures are left out."""
    if isinstance(content, str):
        return content
    texts = [part for part in content if part["type"] != "input_image"]
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in texts)


def parts_of(content: str | Sequence[dict[str, Any]]) -> tuple[str | NamedPicture, ...]:
    """Return the parts of a user's message."""
    if isinstance(content, str) or all(part["type"] != "input_image" for part in content):
        return (text_of(content),)
    return tuple(
        NamedPicture(part["image_url"], "input", "input") if part["type"] == "input_image" else text_of([part])
        for part in content
    )


class _ItemParser:
    def __init__(self, ignored: IgnoredFields | None) -> None:
        self._ignored = ignored

    def parse(self, fields: dict[str, Any], path: str) -> Item:
        kind = fields.get("type") or ("message" if "role" in fields else "item_reference")
        item = parse(_schema_of(kind, _SCHEMAS, path), fields, self._ignored, parent=f"{path}.")
        members = known_fields(item) | {"id": "", "type": kind, "status": "completed"}
        match item:
            case MessageItem():
                del members["phase"]
                return members | {"content": self._content(item, path)}
            case FunctionCallItem():
                members["status"] = "incomplete" if item.status == "incomplete" else "completed"
                return {name: value for name, value in members.items() if value is not None}
            case FunctionCallOutputItem():
                del members["name"], members["namespace"]
                if isinstance(item.output, str):
                    return members
                return members | {"output": self._parts(item.output, f"{path}.output", _OUTPUT_PARTS)}
            case ReasoningItem():
                summary = self._parts(item.summary, f"{path}.summary", _SUMMARY_PARTS)
                return members | {
                    "summary": summary,
                    "content": self._parts(item.content, f"{path}.content", _THOUGHTS),
                }
            case ItemReference():
                return {"type": kind, "id": item.id}
        return members

    def _content(self, item: MessageItem, path: str) -> list[Item]:
        if isinstance(item.content, str):
            return [_text_part("output_text" if item.role == "assistant" else "input_text", item.content)]
        if not item.content:
            raise InvalidRequest(f"{path}.content must not be empty.", param=f"{path}.content", code="invalid_value")
        return self._parts(item.content, f"{path}.content", _USER_PARTS if item.role == "user" else _MESSAGE_PARTS)

    def _parts(self, parts: Sequence[dict[str, Any]], path: str, schemas: Mapping[str, type[Schema]]) -> list[Item]:
        checked = []
        for index, fields in enumerate(parts):
            at = f"{path}[{index}]"
            part = parse(_schema_of(fields.get("type"), schemas, at), fields, self._ignored, parent=f"{at}.")
            checked.append(_text_part(part.type, part.text) if isinstance(part, ItemTextPart) else known_fields(part))
        return checked


def _schema_of(kind: Any, schemas: Mapping[str, type[Schema]], path: str) -> type[Schema]:
    if kind in _UNSUPPORTED:
        refuse_unsupported(f"{path}.type", kind)
    if not isinstance(kind, str) or kind not in schemas:
        refuse(f"{path}.type", f"it must be {' or '.join(schemas)}")
    return schemas[kind]


def _text_part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})
