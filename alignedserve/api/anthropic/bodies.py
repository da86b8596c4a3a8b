"""Bodies that clients of the Messages API may send. Content blocks are checked one by one, by their types."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import FailFast, Field

from alignedserve.api.conversation import MAX_PARTS
from alignedserve.api.errors import refuse
from alignedserve.api.openai.bodies import StopString
from alignedserve.api.openai.parsing import NeutralValues, parse, without_neutral
from alignedserve.api.schema import IgnoredFields, Schema
from alignedserve.core.errors import InvalidRequest

# The one code that clients act on: they go on without a thread, and send the whole conversation.
THREAD_UNSUPPORTED = "thread_unsupported_request"
BlockList = Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)]


class CacheControl(Schema):
    """A mark of where a prefix may be cached. The prefix cache finds prefixes by itself: it has no effect."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Schema):
    """The fields of every block of content."""

    cache_control: CacheControl | None = None


BlockTypes = Mapping[str, type[Block]]


class TextBlock(Block):
    """A text of any role."""

    type: Literal["text"]
    text: str


class ImageSource(Schema):
    """Where a picture is: in the body, or at a URL of a host that pictures are fetched from."""

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] = "image/png"
    data: str = ""
    url: str = ""


class ImageBlock(Block):
    """A picture of a user."""

    type: Literal["image"]
    source: ImageSource


class ToolUseBlock(Block):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, Any] | str = Field(default_factory=dict)  # a text: as it came, perhaps cut off


class ToolResultBlock(Block):
    """The result of a tool's call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: str | BlockList = ""
    is_error: bool = False


class ToolReferenceBlock(Block):
    """A deferred tool that a tool's result makes known."""

    type: Literal["tool_reference"]
    tool_name: str


class ThinkingBlock(Block):
    """A thought of the assistant. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Block):
    """A thought that only the server it came from can read."""

    type: Literal["redacted_thinking"]
    data: str


SYSTEM_BLOCKS: BlockTypes = {"text": TextBlock}
USER_BLOCKS: BlockTypes = {"text": TextBlock, "tool_result": ToolResultBlock, "image": ImageBlock}
RESULT_BLOCKS: BlockTypes = {"text": TextBlock, "tool_reference": ToolReferenceBlock}
ASSISTANT_BLOCKS: BlockTypes = {
    "text": TextBlock,
    "tool_use": ToolUseBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
}


class InputMessage(Schema):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | BlockList  # empty where `max_tokens` cut an answer's first call


class ClientTool(Schema):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool = False  # it is not shown to the model before a tool_reference block names it
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # inputs are always streamed as they come


class ToolChoiceField(Schema):
    """Whether, and which, tools must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Schema):
    """The switch of thoughts before an answer."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Schema):
    """The schema of an answer in JSON."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Schema):
    """The form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(Schema):
    """Facts about the end user; they never change an answer."""

    user_id: str | None = None


class MessageFields(Schema):
    """Fields that decide the prompt."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1), FailFast()]
    system: str | BlockList = ""
    tools: Annotated[list[dict[str, Any]], FailFast()] = Field(default_factory=list)
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the older name of output_config.format
    cache_control: CacheControl | None = None
    user_profile_id: str | None = None  # whom a request is accounted to; there are no accounts here


class CountTokensRequest(MessageFields):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(MessageFields):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[StopString], FailFast()] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = Field(None, ge=0.0, le=1.0)  # None: as the model's makers say, as of the next two
    top_p: float | None = None
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    metadata: Metadata | None = None
    # The last two are ours: a best-effort class, and one before others.
    service_tier: Literal["auto", "standard_only", "priority", "flex"] = "auto"


# Fields that are not supported, each with the values that ask for nothing, as in openai/parsing.py.
_BODY: NeutralValues = {
    "compaction": (),
    "container": (),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "diagnostics": ({"previous_message_id": None},),
    "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
_TOOL: NeutralValues = {"allowed_callers": (["direct"], []), "input_examples": ([],)}
_BLOCK: NeutralValues = {"caller": ({"type": "direct"},), "citations": ([], {"enabled": False}), "toolset_name": ()}

Content = str | Sequence[dict[str, Any]]
FieldsT = TypeVar("FieldsT", bound=MessageFields)


class BodyParser:
    """Parses one body. `ignored` as OpenAI's `parse` takes it; every method raises InvalidRequest naming the field."""

    def __init__(self, ignored: IgnoredFields | None = None) -> None:
        self._ignored = ignored

    def fields(self, schema: type[FieldsT], body: dict[str, Any]) -> FieldsT:
        if body.get("thread") is not None:
            raise InvalidRequest("thread is not supported.", param="thread", code=THREAD_UNSUPPORTED)
        return parse(schema, without_neutral(body, _BODY), self._ignored)

    def tools(self, tools: Sequence[dict[str, Any]]) -> list[ClientTool]:
        return [self._tool(tool, f"tools[{index}].") for index, tool in enumerate(tools)]

    def blocks(self, content: Content, known: BlockTypes, path: str) -> list[tuple[Block, str]]:
        """Check the blocks of a content, a text being one; return each with its path."""
        if isinstance(content, str):
            return [(TextBlock(type="text", text=content), path)]
        paths = [f"{path}[{index}]" for index in range(len(content))]
        return [(self._block(block, known, at), at) for block, at in zip(content, paths, strict=True)]

    def _tool(self, tool: dict[str, Any], path: str) -> ClientTool:
        if tool.get("type") not in (None, "custom"):
            refuse(f"{path}type", "only tools of the type 'custom', which the client runs, are supported")
        return parse(ClientTool, without_neutral(tool, _TOOL, path), self._ignored, parent=path)

    def _block(self, block: dict[str, Any], known: BlockTypes, path: str) -> Block:
        kind = block.get("type")
        schema = known.get(kind) if isinstance(kind, str) else None
        if schema is None:
            refuse(f"{path}.type", f"the blocks supported here are {', '.join(known)}")
        return parse(schema, without_neutral(block, _BLOCK, f"{path}."), self._ignored, parent=f"{path}.")
