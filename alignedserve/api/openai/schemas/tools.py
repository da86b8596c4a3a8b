"""Tools that clients offer, and their choice among them, in OpenAI's shapes."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import FailFast, Field

from alignedserve.api.openai.schemas.messages import FunctionName
from alignedserve.api.schema import Schema
from alignedserve.core.errors import InvalidRequest

MAX_TOOLS = 128
_MODES = ("none", "auto", "required")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
TOOL_CHOICE_FORMS = (
    "must be 'none', 'auto', 'required', {type: 'function', function: {name}} or "
    "{type: 'allowed_tools', allowed_tools: {mode, tools}}"
)

ToolMode = Literal["none", "auto", "required"]


class FunctionDefinition(Schema):
    """A function of the client. Calls are always held to `parameters`, whether `strict` or not."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; unset: no parameters
    strict: bool | None = None


class Tool(Schema):
    """One tool."""

    type: Literal["function"]
    function: FunctionDefinition

    def as_template_tool(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        return {"type": self.type, "function": function | {"parameters": self.function.parameters or _NO_PARAMETERS}}


class ToolChoice(NamedTuple):
    """The tools that an answer may call, and if it may, must or must not."""

    mode: ToolMode = "auto"
    names: tuple[str, ...] | None = None  # None: any of the tools
    unknown: tuple[tuple[str, ...], ...] = ()  # members of the choice that nobody knows


FunctionList = Annotated[list[FunctionDefinition], Field(max_length=MAX_TOOLS), FailFast()]
ToolList = Annotated[list[Tool], Field(max_length=MAX_TOOLS), FailFast()]


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


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raise InvalidRequest for two tools of one name, and for a choice of a tool that is not there."""
    names = [tool.function.name for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InvalidRequest(
                "Two tools have the same name.", param=f"tools[{place}].function.name", code="invalid_value"
            )
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice needs tools.", param="tool_choice", code="invalid_value")
    if any(name not in names for name in choice.names or ()):
        raise InvalidRequest(
            "tool_choice names a tool that is not in tools.", param="tool_choice", code="invalid_value"
        )
