"""Checks the messages of a conversation against each other, and makes them, and functions, those of chat templates."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import orjson

from alignedserve.api.openai.schemas.messages import ChatMessage, TextPart, ToolCall
from alignedserve.api.openai.schemas.requests import ConversationFields
from alignedserve.api.openai.schemas.tools import Tool, ToolChoice, check_tools
from alignedserve.core.errors import InvalidRequest

_MAX_ARGUMENTS_DEPTH = 32

FieldsT = TypeVar("FieldsT", bound=ConversationFields)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidRequest, naming the field, unless every message fits its role and its place.

    The results of an assistant's calls follow the calls at once, one for each, in any order.
    """
    open_calls: set[str] = set()  # ids that still need a result
    for place, message in enumerate(messages):
        path = f"messages[{place}]"
        _check_fields(message, path)
        if message.role == "tool":
            if message.tool_call_id not in open_calls:
                refuse(f"{path}.tool_call_id", f"no call before it has the id {message.tool_call_id!r}")
            open_calls.discard(message.tool_call_id)
        elif open_calls:
            problem = f"the call {min(open_calls)!r} before it has no result yet, which must follow it at once"
            refuse(f"{path}.role", problem)
        open_calls |= _call_ids(message, path)
    if open_calls:
        refuse("messages", f"the call {min(open_calls)!r} has no result, which must follow it")


def refuse(path: str, problem: str) -> NoReturn:
    raise InvalidRequest(f"Invalid value for {path}: {problem}.", param=path, code="invalid_value")


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages for chat templates, of a conversation that was checked.

    `developer` is a newer name of `system`; results get the name of their function.
    """
    names: dict[str, str] = {}
    shown = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls}
        shown.append(_template_message(message, names))
    return shown


def _template_message(message: ChatMessage, names: Mapping[str, str]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _shown_parts(message) if message.has_pictures else message.text,
    }
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_calls:
        shown["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.thought:
        shown["reasoning_content"] = message.thought
    if message.tool_call_id is not None:
        shown |= {"tool_call_id": message.tool_call_id, "name": names.get(message.tool_call_id, "")}
    return shown


def _shown_parts(message: ChatMessage) -> list[dict[str, str]]:
    parts = message.content if isinstance(message.content, list) else []
    return [{"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"} for part in parts]


def _template_call(call: ToolCall) -> dict[str, Any]:
    arguments = _arguments_of(call)
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def _check_fields(message: ChatMessage, path: str) -> None:
    for name in message.fields_of_other_roles():
        refuse(f"{path}.{name}", f"messages of role '{message.role}' do not have it")
    if message.has_pictures and message.role != "user":
        refuse(f"{path}.content", f"messages of role '{message.role}' have no pictures")
    if message.role == "tool" and message.tool_call_id is None:
        raise _missing(f"{path}.tool_call_id")
    if message.content is None and not (message.tool_calls or message.thought):
        raise _missing(f"{path}.content")


def _call_ids(message: ChatMessage, path: str) -> set[str]:
    ids: set[str] = set()
    for place, call in enumerate(message.tool_calls):
        if call.id in ids:
            refuse(f"{path}.tool_calls[{place}].id", "two calls of one message have it")
        if _arguments_of(call) is None:
            problem = f"those of the call {call.id!r} must be the text of a JSON object"
            refuse(f"{path}.tool_calls[{place}].function.arguments", problem)
        ids.add(call.id)
    return ids


def _arguments_of(call: ToolCall) -> dict[str, Any] | None:
    try:
        arguments = orjson.loads(call.function.arguments or "{}")
    except orjson.JSONDecodeError:
        return None
    return arguments if isinstance(arguments, dict) and _is_shallow(arguments, _MAX_ARGUMENTS_DEPTH) else None


def _is_shallow(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    children = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(child, depth - 1) for child in children)


def _missing(path: str) -> InvalidRequest:
    return InvalidRequest(f"Missing required parameter: {path}.", param=path, code="missing_required_parameter")


def checked_conversation(fields: FieldsT) -> FieldsT:
    """Return the fields with functions as tools, checked against each other. Raises InvalidRequest naming the field."""
    shown = fields
    if any(message.role == "function" or message.function_call is not None for message in fields.messages):
        shown = shown.model_copy(update={"messages": _tool_messages(fields.messages)})
    if fields.functions or fields.function_call is not None:
        shown = shown.model_copy(update=_tools_of(fields))
    check_messages(shown.messages)
    try:
        check_tools(shown.tools, shown.tool_choice)
    except InvalidRequest as error:
        if not fields.functions:
            raise
        message, param = function_param(str(error)), function_param(error.param or "")
        raise InvalidRequest(message, param=param, code=error.code) from error
    return shown


def function_param(param: str) -> str:
    return param.replace("tools[", "functions[").replace(".function.", ".").replace("tool_choice", "function_call")


def _tools_of(fields: ConversationFields) -> dict[str, object]:
    choice = fields.function_call or ToolChoice()
    if fields.functions and fields.tools:
        refuse("functions", "it cannot be combined with tools")
    if not fields.functions:
        if choice.mode == "required" or (choice.mode == "none" and fields.tools):
            refuse("function_call", "it needs functions")
        return {}
    if fields.tool_choice != ToolChoice():
        refuse("tool_choice", "it cannot be combined with functions, whose choice is function_call")
    tools = [Tool(type="function", function=function) for function in fields.functions]
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


def _tool_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    shown: list[ChatMessage] = []
    for place, message in enumerate(messages):
        path = f"messages[{place}]"
        if message.role == "function":
            shown.append(_result(message, messages[place - 1] if place else None, path, _call_id(place - 1)))
        elif message.function_call is not None:
            if message.role != "assistant" or message.tool_calls:
                refuse(f"{path}.function_call", "only messages of an assistant without tool_calls have it")
            call = ToolCall(id=_call_id(place), function=message.function_call)
            shown.append(message.model_copy(update={"tool_calls": [call], "function_call": None}))
        else:
            shown.append(message)
    return shown


def _result(message: ChatMessage, before: ChatMessage | None, path: str, call_id: str) -> ChatMessage:
    call = before.function_call if before is not None else None
    if call is None:
        refuse(f"{path}.role", "the message before it calls no function")
    if message.name != call.name:
        refuse(f"{path}.name", "it must be the name of the function that the message before it calls")
    return message.model_copy(update={"role": "tool", "tool_call_id": call_id})


def _call_id(place: int) -> str:
    return f"call_of_message_{place}"
