"""Tools that clients offer, and their choice among them, in OpenAI's shapes."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from alignedserve.api.conversation import MAX_TOOLS, ToolChoice
from alignedserve.api.openai.schemas.messages import FunctionName
from alignedserve.api.schema import Schema

_MODES = ("none", "auto", "required")
TOOL_CHOICE_FORMS = (
    "must be 'none', 'auto', 'required', {type: 'function', function: {name}} or "
    "{type: 'allowed_tools', allowed_tools: {mode, tools}}"
)


class FunctionDefinition(Schema):
    """A function of the client. Calls are always held to `parameters`, whether `strict` or not."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; unset: no parameters
    strict: bool | None = None


class ChatTool(Schema):
    """One tool."""

    type: Literal["function"]
    function: FunctionDefinition


FunctionList = Annotated[list[FunctionDefinition], Field(max_length=MAX_TOOLS), FailFast()]
ToolList = Annotated[list[ChatTool], Field(max_length=MAX_TOOLS), FailFast()]


def parse_tool_choice(choice: Any) -> ToolChoice:
    """Return the choice in any of its forms. Raises ValueError saying which there are."""
    match choice:
        case str() if choice in _MODES:
            return ToolChoice(choice)  # type: ignore[arg-type]
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        }:
            if len(tools) <= MAX_TOOLS:
                unknown = _unknown_members(choice, allowed_tools=("mode", "tools"))
                return ToolChoice(mode, tuple(_name(tool) for tool in tools), unknown)
            raise ValueError(TOOL_CHOICE_FORMS)
        case _:
            return ToolChoice("required", (_name(choice),), _unknown_members(choice, function=("name",)))


def parse_function_call(choice: Any) -> ToolChoice:
    """Return the choice among functions, which tools replaced. Raises ValueError saying which there are."""
    match choice:
        case "none" | "auto":
            return ToolChoice(choice)
        case {"name": str(name)}:
            unknown = tuple((member,) for member, value in choice.items() if member != "name" and value is not None)
            return ToolChoice("required", (name,), unknown)
    raise ValueError("must be 'none', 'auto' or {name}")


def _name(choice: Any) -> str:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise ValueError(TOOL_CHOICE_FORMS)


def _unknown_members(choice: dict[str, Any], **known: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    ((inner, names),) = known.items()
    outside = [(name,) for name, value in choice.items() if name not in ("type", inner) and value is not None]
    inside = [(inner, name) for name, value in choice[inner].items() if name not in names and value is not None]
    return (*outside, *inside)
