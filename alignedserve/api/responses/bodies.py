"""Bodies of the Responses API and the items of an input. Items are dispatched by type in `parsing`."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from alignedserve.api.conversation import MAX_PARTS, MAX_TOOLS
from alignedserve.api.errors import refuse, refuse_unsupported
from alignedserve.api.openai.bodies import ReasoningEffort, SamplingFields, Verbosity
from alignedserve.api.openai.parsing import SchemaT, parse, without_fields_of_chat
from alignedserve.api.schema import IgnoredFields, Metadata, Schema
from alignedserve.core.errors import InvalidRequest

MAX_ITEMS = 4096  # of one input
MAX_NEW_ITEMS = 20  # of one addition to a conversation
_MAX_ID_LEN = 256

ItemId = Annotated[str, Field(max_length=_MAX_ID_LEN)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(Schema):
    """How much the model thinks, and what is shown of it: always all, in the item's content."""

    effort: ReasoningEffort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class TextFormat(Schema):
    """`text.format`: chat's `response_format` with the members of `json_schema` beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFields(Schema):
    """`text`: form and length of the answer."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ResponseStreamOptions(Schema):
    """Options of a streamed response."""

    include_obfuscation: Literal[False] | None = None


class FunctionTool(Schema):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(Schema):
    """Functions under a common name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)]


Tool = FunctionTool | NamespaceTool


class ToolChoiceMembers(Schema):
    """The members that a choice of tools may have, whatever its type; `request_builder` reads it."""

    type: Any = None
    name: Any = None
    mode: Any = None
    tools: Any = None


class ConversationId(Schema):
    """The conversation that a response is part of."""

    id: str


class CreateConversationRequest(Schema):
    """Body of POST /v1/conversations."""

    items: Annotated[list[dict[str, Any]], Field(max_length=MAX_NEW_ITEMS)] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


class UpdateConversationRequest(Schema):
    """Body of POST /v1/conversations/{id}."""

    metadata: Metadata


class CreateItemsRequest(Schema):
    """Body of POST /v1/conversations/{id}/items."""

    items: Annotated[list[dict[str, Any]], Field(max_length=MAX_NEW_ITEMS)]


class ResponseFields(Schema):
    """Fields that shape the prompt: those of a response and of a count of input tokens."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS)] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextFields | None = None
    truncation: Literal["auto", "disabled"] = "disabled"

    @property
    def conversation_id(self) -> str | None:
        """Return the id of the conversation, however it was given."""
        conversation = self.conversation
        return conversation.id if isinstance(conversation, ConversationId) else conversation


class InputTokensRequest(ResponseFields):
    """Body of POST /v1/responses/input_tokens."""

    model: str | None = None  # type: ignore[assignment]  # unset: the served one


class CreateResponseRequest(ResponseFields, SamplingFields):
    """Body of POST /v1/responses. Unset means OpenAI's default."""

    background: bool = False
    include: list[Include] = Field(default_factory=list)
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, ge=1)  # of hosted tools, which are refused
    metadata: Metadata = Field(default_factory=dict)
    store: bool | None = None  # where responses are stored: True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    # Hints about the end user; they never change an answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ItemTextPart(Schema):
    """Text of a message, or of what a function returned."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)  # of answers sent back, like the next
    logprobs: list[Any] = Field(default_factory=list)


class ItemImagePart(Schema):
    """A picture as a data URL, or where it is. `detail` is a hint without effect."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] = "auto"


class RefusalPart(Schema):
    """A refusal in an answer sent back."""

    type: Literal["refusal"]
    refusal: str


class ReasoningPart(Schema):
    """A part of a thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


Parts = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)]


class Item(Schema):
    """Base of items. Clients send `id` and `status` back as they got them; both are given anew."""

    id: ItemId | None = None
    status: ItemStatus | None = None


class MessageItem(Item):
    """A message; `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts
    phase: str | None = None  # of answers sent back


class FunctionCallItem(Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: ItemId
    name: str
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(Item):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: str | Parts
    name: str | None = None  # of the function, which the call tells, like the next
    namespace: str | None = None


class ReasoningItem(Item):
    """A thought of the model, sent back."""

    type: Literal["reasoning"]
    summary: Parts = Field(default_factory=list)
    content: Parts = Field(default_factory=list)


class ItemReference(Schema):
    """An item of a stored response, by its id; `type` may be left out."""

    type: Literal["item_reference"] = "item_reference"
    id: ItemId


def known_fields(body: Schema, *, with_unset: bool = True) -> dict[str, Any]:
    """Return the fields that the schema has, by the names that clients use; those of other schemas are not for this."""
    fields = {field.alias or name: getattr(body, name) for name, field in type(body).model_fields.items()}
    return fields if with_unset else {name: value for name, value in fields.items() if value is not None}


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
    parsed = _parse(CreateResponseRequest, without_fields_of_chat(body, CreateResponseRequest), ignored)
    if parsed.stream_options is not None and not parsed.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    if parsed.background and parsed.store is False:
        raise InvalidRequest("background needs store to be true.", param="store")
    return parsed


def parse_input_tokens(body: dict[str, Any], ignored: IgnoredFields | None) -> InputTokensRequest:
    """Check the body of a count of input tokens, except its items. Raises InvalidRequest naming the field."""
    return _parse(InputTokensRequest, body, ignored)


def _parse(schema: type[SchemaT], body: dict[str, Any], ignored: IgnoredFields | None) -> SchemaT:
    for name in _UNSUPPORTED:
        if body.get(name) is not None:
            refuse_unsupported(name)
    if body.get("conversation") is not None and body.get("previous_response_id") is not None:
        raise InvalidRequest("Give conversation or previous_response_id, not both.", param="conversation")
    if isinstance(choice := body.get("tool_choice"), dict):
        parse(ToolChoiceMembers, choice, ignored, parent="tool_choice.")
    return parse(schema, body | {"tools": parse_tools(body.get("tools"), ignored)}, ignored)


class OfferedFunction(NamedTuple):
    """A function with its names in the prompt and in items."""

    chat_name: str
    names: dict[str, str]  # `name`, and `namespace` where it has one
    tool: FunctionTool
    path: str  # where it stands in the body


def parse_tools(tools: Any, ignored: IgnoredFields | None, path: str = "tools") -> Any:
    """Return the tools of a body as schemas; what is no list is left to the body's schema. Raises InvalidRequest."""
    if not isinstance(tools, list):
        return tools
    return [_parse_tool(tool, ignored, f"{path}[{index}]") for index, tool in enumerate(tools)]


def offered_functions(tools: Sequence[Tool]) -> Iterator[OfferedFunction]:
    for index, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            yield OfferedFunction(tool.name, {"name": tool.name}, tool, f"tools[{index}]")
            continue
        for inner_place, inner in enumerate(tool.tools):
            names = {"name": inner.name, "namespace": tool.name}
            yield OfferedFunction(chat_name(**names), names, inner, f"tools[{index}].tools[{inner_place}]")


def chat_name(name: str, namespace: str | None = None) -> str:
    """Return a function's name in the prompt: templates know no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def tool_view(tool: Tool) -> dict[str, Any]:
    view = known_fields(tool)
    return (
        view | {"tools": [known_fields(function) for function in tool.tools]}
        if isinstance(tool, NamespaceTool)
        else view
    )


def _parse_tool(tool: Any, ignored: IgnoredFields | None, path: str) -> Any:
    if not isinstance(tool, dict):
        refuse(path, "it must be an object")
    kind = tool.get("type")
    if kind in _HOSTED_TOOLS:
        refuse_unsupported(f"{path}.type", kind)
    if kind != "namespace" or ".tools[" in path:
        return parse(FunctionTool, tool, ignored, parent=f"{path}.")
    tools = parse_tools(tool.get("tools"), ignored, f"{path}.tools")
    return parse(NamespaceTool, tool | {"tools": tools}, ignored, parent=f"{path}.")
