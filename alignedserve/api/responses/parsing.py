"""Parses bodies of the Responses API. What is not supported and would change an answer is refused by name.

Functions may be in namespaces, which chat completions do not know: one is called `NAMESPACE__NAME` in the prompt, and
items have both names apart.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from alignedserve.api.openai.parsing import SchemaT, parse, without_fields_of_chat
from alignedserve.api.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.api.responses.schemas import (
    CreateResponseRequest,
    FunctionTool,
    InputTokensRequest,
    NamespaceTool,
    Tool,
    ToolChoice,
    known_fields,
)
from alignedserve.core.errors import InvalidRequest

_UNSUPPORTED = (
    *("access_programs", "context_management", "image", "moderation", "personality", "prompt"),
    *("prompt_cache_options", "prompt_cache_retention"),
)

_HOSTED_TOOLS = (
    *("file_search", "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    *("computer", "computer_use_preview", "mcp", "code_interpreter", "image_generation", "local_shell", "shell"),
    *("apply_patch", "custom", "tool_search", "programmatic_tool_calling"),
)


def parse_response(body: dict[str, Any], ignored: IgnoredFields | None) -> CreateResponseRequest:
    """Check the body of a new response, except its items. Raises InvalidRequest naming the field."""
    asked = _parse(CreateResponseRequest, without_fields_of_chat(body, CreateResponseRequest), ignored)
    if asked.stream_options is not None and not asked.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    if asked.background and asked.store is False:
        raise InvalidRequest("background needs store to be true.", param="store")
    return asked


def parse_input_tokens(body: dict[str, Any], ignored: IgnoredFields | None) -> InputTokensRequest:
    """Check the body of a count of input tokens, except its items. Raises InvalidRequest naming the field."""
    return _parse(InputTokensRequest, body, ignored)


def _parse(schema: type[SchemaT], body: dict[str, Any], ignored: IgnoredFields | None) -> SchemaT:
    for name in _UNSUPPORTED:
        if body.get(name) is not None:
            _refuse(name)
    if body.get("conversation") is not None and body.get("previous_response_id") is not None:
        raise InvalidRequest("Give conversation or previous_response_id, not both.", param="conversation")
    if isinstance(choice := body.get("tool_choice"), dict):
        parse(ToolChoice, choice, ignored, parent="tool_choice.")
    return parse(schema, body | {"tools": parse_tools(body.get("tools"), ignored)}, ignored)


def _refuse(what: str, param: str | None = None) -> NoReturn:
    raise InvalidRequest(f"{what} is not supported.", param=param or what, code="unsupported_parameter")


class OfferedFunction(NamedTuple):
    """A function with its names in the prompt and in items."""

    chat_name: str
    names: dict[str, str]  # `name`, and `namespace` where it has one
    tool: FunctionTool
    path: str  # where it stands in the body


def parse_tools(given: Any, ignored: IgnoredFields | None, path: str = "tools") -> Any:
    """Return the tools of a body as schemas; what is no list is left to the body's schema. Raises InvalidRequest."""
    if not isinstance(given, list):
        return given
    return [_parse_tool(one, ignored, f"{path}[{place}]") for place, one in enumerate(given)]


def offered_functions(tools: Sequence[Tool]) -> Iterator[OfferedFunction]:
    for place, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            yield OfferedFunction(tool.name, {"name": tool.name}, tool, f"tools[{place}]")
            continue
        for inner_place, inner in enumerate(tool.tools):
            names = {"name": inner.name, "namespace": tool.name}
            yield OfferedFunction(chat_name(**names), names, inner, f"tools[{place}].tools[{inner_place}]")


def chat_name(name: str, namespace: str | None = None) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def tool_view(tool: Tool) -> dict[str, Any]:
    view = known_fields(tool)
    return view | {"tools": [known_fields(one) for one in tool.tools]} if isinstance(tool, NamespaceTool) else view


def _parse_tool(given: Any, ignored: IgnoredFields | None, path: str) -> Any:
    if not isinstance(given, dict):
        raise InvalidRequest(f"Invalid value for {path}: it must be an object.", param=path, code="invalid_value")
    kind = given.get("type")
    if kind in _HOSTED_TOOLS:
        message = f"{path}.type {kind!r} is not supported."
        raise InvalidRequest(message, param=f"{path}.type", code="unsupported_parameter")
    if kind != "namespace" or ".tools[" in path:
        return parse(FunctionTool, given, ignored, parent=f"{path}.")
    tools = parse_tools(given.get("tools"), ignored, f"{path}.tools")
    return parse(NamespaceTool, given | {"tools": tools}, ignored, parent=f"{path}.")
