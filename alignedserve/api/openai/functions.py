"""Functions, as OpenAI's API named tools at first: translated to tools and back."""

from collections.abc import Sequence
from typing import TypeVar

from alignedserve.api.openai.conversation import check_messages, refuse
from alignedserve.api.openai.schemas.messages import ChatMessage, ToolCall
from alignedserve.api.openai.schemas.requests import ConversationFields
from alignedserve.api.openai.schemas.tools import Tool, ToolChoice, check_tools
from alignedserve.core.errors import InvalidRequest

FieldsT = TypeVar("FieldsT", bound=ConversationFields)


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
        raise InvalidRequest(str(error), param=function_param(error.param or ""), code=error.code) from error
    return shown


def function_param(param: str) -> str:
    """Return the path of a function for that of a tool, in errors."""
    return param.replace("tools[", "functions[").replace(".function.", ".").replace("tool_choice", "function_call")


def _tools_of(fields: ConversationFields) -> dict[str, object]:
    choice = fields.function_call or ToolChoice()
    if fields.functions and fields.tools:
        refuse("functions", "it cannot be combined with tools")
    if not fields.functions:
        if choice.mode == "required":
            refuse("function_call", "it needs functions")
        return {}
    tools = [Tool(type="function", function=function) for function in fields.functions]
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}


def _tool_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with calls of functions as those of tools, each result with the id of the call before it."""
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
