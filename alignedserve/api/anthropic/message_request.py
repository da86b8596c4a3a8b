"""Translates bodies of the Messages API, and builds their requests.

Bodies that clients of the Messages API may send. Content blocks are checked one by one, by their types.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import FailFast, Field

from alignedserve.api.conversation import (
    MAX_PARTS,
    AnswerSpec,
    Constraint,
    Conversation,
    FieldNames,
    NamedPicture,
    OfferedTool,
    PastCall,
    PastMessage,
    ToolChoice,
    check_conversation,
)
from alignedserve.api.errors import refuse
from alignedserve.api.models.model_services import ModelServices, PromptServices
from alignedserve.api.openai.bodies import StopString
from alignedserve.api.openai.parsing import NeutralValues, parse, without_neutral
from alignedserve.api.openai.prompt_encoding import Prompts, answer_forms, encode_chat
from alignedserve.api.openai.request_builder import Arrival, GenerationRequest, build_chat_request
from alignedserve.api.schema import IgnoredFields, Schema
from alignedserve.api.work_lanes import rough_length
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.runtime.grammar.constraints import StructuredOutputs

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


_SERVICE_TIERS = {"auto": "auto", "standard_only": "default", "priority": "priority", "flex": "flex"}
_DEFAULT_EFFORT = "high"  # asks nothing
_SWITCHES = ("enable_thinking", "thinking")  # the names that templates have for it
_NAMES = FieldNames(
    effort="output_config.effort", thinking_budget="thinking.budget_tokens", answer_format="output_config.format"
)
_SCHEMA_PATH = "output_config.format.schema"


class MessageTranslator:
    """Translates the messages of one body. Templates expect turns of alternating roles: equal neighbours are joined."""

    def __init__(self, parser: BodyParser) -> None:
        self.messages: list[PastMessage] = []
        self.referenced_tools: set[str] = set()  # deferred tools that results have made known
        self._parser = parser

    def translate(self, system: Content, messages: Sequence[InputMessage]) -> None:
        """Fill `messages`. Raises InvalidRequest naming the field."""
        if system:
            self._add(PastMessage("system", "system", self._texts(system, "system")))
        for index, message in enumerate(messages):
            for translated in self._translated(message, f"messages[{index}]"):
                self._add(translated)
        if messages[-1].role == "assistant":
            path = f"messages[{len(messages) - 1}].role"
            raise InvalidRequest(f"{path}: prefilling an answer is not supported.", param=path)

    def _translated(self, message: InputMessage, path: str) -> Iterator[PastMessage]:
        if message.role == "assistant":
            yield self._assistant_message(message, path)
        elif message.content == []:
            refuse(f"{path}.content", "List should have at least 1 item")
        elif message.role == "system":
            yield PastMessage("system", path, self._texts(message.content, f"{path}.content"))
        else:
            yield from self._user_messages(message, path)

    def _user_messages(self, message: InputMessage, path: str) -> Iterator[PastMessage]:
        parts: list[str | NamedPicture] = []
        for block, at in self._parser.blocks(message.content, USER_BLOCKS, f"{path}.content"):
            if isinstance(block, TextBlock):
                parts.append(block.text)
            elif isinstance(block, ImageBlock):
                parts.append(NamedPicture(_url_of(block), path, path))
            elif isinstance(block, ToolResultBlock):
                if parts:
                    raise InvalidRequest(f"{at} must stand before the text and the pictures of its message.", param=at)
                result = self._result(block, at)
                yield PastMessage("tool", path, (result,), call_id=block.tool_use_id)
        if parts:
            yield PastMessage("user", path, tuple(parts))

    def _result(self, result: ToolResultBlock, path: str) -> str:
        texts = []
        for block, _ in self._parser.blocks(result.content, RESULT_BLOCKS, f"{path}.content"):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolReferenceBlock):
                self.referenced_tools.add(block.tool_name)
                texts.append(f"The tool {block.tool_name} is available now.")
        content = "\n".join(texts)
        return f"Error: {content}" if result.is_error else content

    def _assistant_message(self, message: InputMessage, path: str) -> PastMessage:
        texts, thoughts, calls = [], [], []
        for block, _ in self._parser.blocks(message.content, ASSISTANT_BLOCKS, f"{path}.content"):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                calls.append(PastCall.of(block.id, block.name, block.input))
        thought = "\n".join(thoughts) if any(thoughts) else None
        return PastMessage("assistant", path, tuple(texts), tuple(calls), thought)

    def _texts(self, content: Content, path: str) -> tuple[str, ...]:
        blocks = self._parser.blocks(content, SYSTEM_BLOCKS, path)
        return tuple(block.text for block, _ in blocks if isinstance(block, TextBlock))

    def _add(self, message: PastMessage) -> None:
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != message.role or message.role not in ("user", "assistant"):
            self.messages.append(message)
            return
        thought = (last.thought or "") + (message.thought or "")
        self.messages[-1] = last._replace(
            parts=last.parts + message.parts, calls=last.calls + message.calls, thought=thought or None
        )


def _url_of(block: ImageBlock) -> str:
    source = block.source
    return source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"


def conversation_of_message(body: MessageFields, parser: BodyParser) -> Conversation:
    """Return the conversation, checked. Raises InvalidRequest naming the field."""
    translator = MessageTranslator(parser)
    translator.translate(body.system, body.messages)
    tools = (
        OfferedTool(tool.name, tool.description, tool.input_schema, path, f"{path}.input_schema", tool.strict is True)
        for path, tool in ((f"tools[{index}]", tool) for index, tool in enumerate(parser.tools(body.tools)))
        if not tool.defer_loading or tool.name in translator.referenced_tools
    )
    effort = body.output_config.effort if body.output_config is not None else None
    thinking = body.thinking
    return check_conversation(
        Conversation(
            tuple(translator.messages),
            tuple(tools),
            _tool_choice(body.tool_choice),
            has_parallel_calls=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
            effort=None if effort == _DEFAULT_EFFORT else effort,
            thinking_budget=thinking.budget_tokens if thinking is not None else None,
            variables=_switches(thinking) if thinking is not None else {},
            names=_NAMES,
        )
    )


def _tool_choice(choice: ToolChoiceField | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest("tool_choice.name belongs to the type 'tool', and only to it.", param="tool_choice.name")
    match choice.type:
        case "auto" | "none":
            return ToolChoice(choice.type)
        case "any":
            return ToolChoice("required")
    return ToolChoice("required", (choice.name or "",))


def _switches(thinking: Thinking) -> dict[str, bool]:
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise InvalidRequest(
            "thinking.budget_tokens belongs to the type 'enabled', and only to it.", param="thinking.budget_tokens"
        )
    return {} if thinking.type == "adaptive" else dict.fromkeys(_SWITCHES, thinking.type == "enabled")


def message_spec(body: MessagesRequest) -> AnswerSpec:
    """Return what the answer is to be: of `max_tokens` at most, or of as many as the context has room for."""
    config = body.output_config
    form = config.format if config is not None and config.format is not None else body.output_format
    outputs = StructuredOutputs(json=form.json_schema) if form is not None else None
    return AnswerSpec.of(
        body,
        id_prefix="msg_",
        prompt_param="messages",
        max_tokens=None,
        max_fitting_tokens=body.max_tokens,
        constraint=Constraint(outputs, _SCHEMA_PATH) if outputs is not None else None,
        stop=body.stop_sequences,
        stop_param="stop_sequences",
        service_tier=_SERVICE_TIERS[body.service_tier],
    )


async def build_message_request(
    body: MessagesRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None = None
) -> GenerationRequest:
    """Return the request of a message. `prompts`: None: they are made here. Raises InvalidRequest."""
    conversation = await _translated(body, arrival.ignored, services)
    prompts = prompts or await _prompts(conversation, services)
    if problem := _unheeded_thinking(body, services):
        if arrival.ignored is None:
            raise InvalidRequest(problem, param="thinking")
        arrival.ignored.add("thinking")
        conversation = replace(conversation, thinking_budget=None)
    try:
        return await build_chat_request(conversation, message_spec(body), arrival, services, prompts)
    except ContextTooLong as error:
        raise _prompt_too_long(len(prompts[0].token_ids), services) from error


def _unheeded_thinking(body: MessagesRequest, model: ModelServices) -> str | None:
    """Return why the model cannot do what `thinking` asks for; None: it can."""
    template = model.tokenizer.chat_template
    if body.thinking is None or template is None:
        return None
    _, reasoning = answer_forms(model)
    if body.thinking.type == "enabled" and reasoning is None:
        return "This model does not think."
    has_switch = any(name in template.variables for name in _SWITCHES)
    always_thinks = reasoning is not None and not has_switch
    return "This model always thinks." if body.thinking.type == "disabled" and always_thinks else None


async def message_prompts(body: MessagesRequest, services: PromptServices, ignored: IgnoredFields | None) -> Prompts:
    """Return the one prompt of a message. Raises InvalidRequest."""
    return await _prompts(await _translated(body, ignored, services), services)


async def count_answer(body: MessageFields, services: PromptServices, ignored: IgnoredFields | None) -> bytes:
    """Return the answer that has the number of tokens of the prompt, however long. Raises InvalidRequest."""
    prompt = await encode_chat(await _translated(body, ignored, services), services)
    return orjson.dumps({"input_tokens": len(prompt.token_ids)})


async def _translated(body: MessageFields, ignored: IgnoredFields | None, services: PromptServices) -> Conversation:
    translate = partial(conversation_of_message, body, BodyParser(ignored))
    return await services.lanes.run(rough_length(body), translate)


async def _prompts(conversation: Conversation, services: PromptServices) -> Prompts:
    try:
        return (await encode_chat(conversation, services, is_bounded=True),)
    except ContextTooLong as error:
        raise _prompt_too_long(error.num_tokens, services) from error


def _prompt_too_long(num_tokens: int | None, services: PromptServices) -> ContextTooLong:
    """Return the error in the words by which clients know that they must shorten their conversation."""
    limit = services.model.max_context_len - 1
    return ContextTooLong(f"prompt is too long: {num_tokens} tokens > {limit} maximum")
