"""Translates bodies of the Messages API into chat completions, names of fields back, and builds their requests."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from alignedserve.api.anthropic.parsing import BodyParser, Content
from alignedserve.api.anthropic.schemas import (
    ASSISTANT_BLOCKS,
    RESULT_BLOCKS,
    SYSTEM_BLOCKS,
    USER_BLOCKS,
    ImageBlock,
    InputMessage,
    JsonFormat,
    MessagesRequest,
    PromptFields,
    TextBlock,
    Thinking,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from alignedserve.api.models.model_card import PromptServices
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.chat_prompt import answer_forms
from alignedserve.api.openai.generation_request import Arrival, GenerationRequest
from alignedserve.api.openai.parsing import parse_chat
from alignedserve.api.openai.prompt_encoding import Prompts, chat_prompts, encode_chat
from alignedserve.api.openai.request_builder import build_chat_request
from alignedserve.api.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.api.openai.schemas.requests import ChatCompletionRequest
from alignedserve.api.work_lanes import rough_length
from alignedserve.core.errors import ContextTooLong, InvalidRequest

ChatMessage = dict[str, Any]

_SERVICE_TIERS = {"auto": "auto", "standard_only": "default", "priority": "priority", "flex": "flex"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_DEFAULT_EFFORT = "high"  # asks nothing
_SWITCHES = ("enable_thinking", "thinking")  # the names that templates have for it
_INDEXED = re.compile(r"(messages|tools)\[(\d+)\]")
# Paths in a chat body, and this API's.
_NAMES = (
    ("response_format.json_schema.schema", "output_config.format.schema"),
    ("response_format", "output_config.format"),
    (".function.parameters", ".input_schema"),
    ("tool_choice.function", "tool_choice"),
    (".function", ""),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("reasoning_effort", "output_config.effort"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("chat_template_kwargs", "thinking"),
)


class Conversation:
    """Messages for chat completions. Turns of one role in a row become one, as templates expect."""

    def __init__(self, system: Content, messages: Sequence[InputMessage], parser: BodyParser) -> None:
        self.messages: list[ChatMessage] = []
        self.paths: list[str] = []  # of the field that each message came from
        self.referenced_tools: set[str] = set()  # deferred tools that results have made known
        self._parser = parser
        if system:
            self._add({"role": "system", "content": self._text_parts(system, "system")}, "system")
        for place, message in enumerate(messages):
            path = f"messages[{place}]"
            for translated in self._translate(message, f"{path}.content"):
                self._add(translated, path)
        if messages[-1].role == "assistant":
            path = f"messages[{len(messages) - 1}].role"
            raise InvalidRequest(f"{path}: prefilling an answer is not supported.", param=path)

    def _translate(self, message: InputMessage, path: str) -> Iterator[ChatMessage]:
        if message.role == "assistant":
            yield self._assistant_message(message, path)
        elif message.role == "system":
            yield {"role": "system", "content": self._text_parts(message.content, path)}
        else:
            yield from self._user_messages(message, path)

    def _user_messages(self, message: InputMessage, path: str) -> Iterator[ChatMessage]:
        parts: list[dict[str, Any]] = []
        for block, at in self._parser.blocks(message.content, USER_BLOCKS, path):
            if isinstance(block, TextBlock):
                parts.append(_text_part(block))
            elif isinstance(block, ImageBlock):
                parts.append(_image_part(block))
            elif isinstance(block, ToolResultBlock):
                if parts:
                    raise InvalidRequest(f"{at} must stand before the text and the pictures of its message.", param=at)
                yield self._tool_message(block, at)
        if parts:
            yield {"role": "user", "content": parts}

    def _tool_message(self, result: ToolResultBlock, path: str) -> ChatMessage:
        texts = []
        for block, _ in self._parser.blocks(result.content, RESULT_BLOCKS, f"{path}.content"):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolReferenceBlock):
                self.referenced_tools.add(block.tool_name)
                texts.append(f"The tool {block.tool_name} is available now.")
        content = "\n".join(texts)
        return {
            "role": "tool",
            "tool_call_id": result.tool_use_id,
            "content": f"Error: {content}" if result.is_error else content,
        }

    def _assistant_message(self, message: InputMessage, path: str) -> ChatMessage:
        parts, thoughts, calls = [], [], []
        for block, _ in self._parser.blocks(message.content, ASSISTANT_BLOCKS, path):
            if isinstance(block, TextBlock):
                parts.append(_text_part(block))
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                calls.append(_tool_call(block))
        translated: ChatMessage = {"role": "assistant", "content": parts or (None if calls else "")}
        translated |= {"tool_calls": calls} if calls else {}
        return translated | ({"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {})

    def _text_parts(self, content: Content, path: str) -> list[dict[str, str]]:
        return [_text_part(block) for block, _ in self._parser.blocks(content, SYSTEM_BLOCKS, path)]

    def _add(self, message: ChatMessage, path: str) -> None:
        if self.messages and self.messages[-1]["role"] == message["role"] in ("user", "assistant"):
            self.messages[-1] = _joined(self.messages[-1], message)
        else:
            self.messages.append(message)
            self.paths.append(path)


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    joined = first | second
    for name in first.keys() & second.keys() - {"role"}:
        one, other = first[name], second[name]
        joined[name] = one + other if one and other and type(one) is type(other) else one or other
    return joined


def _tool_call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = orjson.dumps(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _image_part(block: ImageBlock) -> dict[str, Any]:
    source = block.source
    url = source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _text_part(block: Any) -> dict[str, str]:
    return {"type": "text", "text": block.text}


@dataclass(frozen=True, slots=True)
class ChatBody:
    """The fields of a chat completion, and where its messages and tools came from."""

    fields: dict[str, Any]
    message_paths: list[str]
    tool_paths: list[str]

    @contextmanager
    def naming_own_fields(self) -> Iterator[None]:
        try:
            yield
        except InvalidRequest as error:
            if error.param is None:
                raise
            name = self._own_name(error.param)
            message = str(error).replace(error.param, name, 1)
            raise type(error)(message, param=name, code=error.code) from error

    def _own_name(self, path: str) -> str:
        if path == "stop":
            return "stop_sequences"
        found = _INDEXED.match(path)
        if found is not None:
            places = self.message_paths if found[1] == "messages" else self.tool_paths
            place = places[int(found[2])] if int(found[2]) < len(places) else found[1]
            path = place if found[1] == "messages" else place + path[found.end() :]
        for chat_name, own_name in _NAMES:
            path = path.replace(chat_name, own_name)
        return path


def chat_body_of(asked: PromptFields, parser: BodyParser) -> ChatBody:
    """Return the body with all fields that decide the prompt. Raises InvalidRequest naming the field."""
    conversation = Conversation(asked.system, asked.messages, parser)
    tools = {
        f"tools[{place}]": tool
        for place, tool in enumerate(parser.tools(asked.tools))
        if not tool.defer_loading or tool.name in conversation.referenced_tools
    }
    fields = {"model": asked.model, "messages": conversation.messages}
    fields |= {"tools": [_function(tool) for tool in tools.values()]} if tools else {}
    fields |= _tool_choice_fields(asked.tool_choice) if asked.tool_choice is not None else {}
    fields |= _thinking_fields(asked.thinking) if asked.thinking is not None else {}
    fields |= _output_fields(asked)
    return ChatBody(fields, conversation.paths, list(tools))


def sampling_fields(asked: MessagesRequest) -> dict[str, Any]:
    """Return the other fields of the chat body. Its answer is limited by the context alone (see message_request)."""
    return {
        "stream": asked.stream,
        "stop": asked.stop_sequences,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "service_tier": _SERVICE_TIERS[asked.service_tier],
    }


def _function(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    function |= {"description": tool.description} if tool.description is not None else {}
    function |= {"strict": tool.strict} if tool.strict is not None else {}
    return {"type": "function", "function": function}


def _tool_choice_fields(choice: ToolChoice) -> dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequest("tool_choice.name belongs to the type 'tool', and only to it.", param="tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return {"tool_choice": _TOOL_CHOICES.get(choice.type, named)} | parallel


def _thinking_fields(thinking: Thinking) -> dict[str, Any]:
    if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
        raise InvalidRequest(
            "thinking.budget_tokens belongs to the type 'enabled', and only to it.", param="thinking.budget_tokens"
        )
    if thinking.type == "adaptive":
        return {}
    budget = {"thinking_token_budget": thinking.budget_tokens} if thinking.budget_tokens is not None else {}
    return {"chat_template_kwargs": dict.fromkeys(_SWITCHES, thinking.type == "enabled")} | budget


def _output_fields(asked: PromptFields) -> dict[str, Any]:
    config = asked.output_config
    form = config.format if config is not None and config.format is not None else asked.output_format
    effort = config.effort if config is not None else None
    effort_fields = {"reasoning_effort": effort} if effort not in (None, _DEFAULT_EFFORT) else {}
    return effort_fields | ({"response_format": _response_format(form)} if form is not None else {})


def _response_format(form: JsonFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.json_schema, "strict": True}}


async def build_message_request(
    asked: MessagesRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None = None
) -> GenerationRequest:
    """Return the request of a message. `prompts`: None: they are made here. Raises InvalidRequest.

    `max_tokens` may be more than the context has room for: then the answer ends where the context does.
    """
    chat_body, chat = await _translated(asked, arrival.ignored, services, sampling_fields(asked))
    with chat_body.naming_own_fields():
        (prompt,) = prompts = prompts or await _prompts(chat, services)
        _note_thinking(asked, services, arrival.ignored)
        try:
            response_id = f"msg_{arrival.request_id}"
            return await build_chat_request(
                chat,
                arrival,
                services,
                prompts,
                response_id=response_id,
                at_most=asked.max_tokens,
                effort_name="output_config.effort",
            )
        except ContextTooLong as error:
            raise _prompt_too_long(len(prompt.token_ids), services) from error


def _note_thinking(asked: MessagesRequest, model: ModelServices, ignored: IgnoredFields | None) -> None:
    """Name `thinking` among the ignored fields where it is off and the model always thinks.

    `ignored`: None: such fields are refused, with InvalidRequest.
    """
    template = model.tokenizer.chat_template
    if asked.thinking is None or asked.thinking.type != "disabled" or template is None:
        return
    _, reasoning = answer_forms(model)
    if reasoning is not None and not any(name in template.variables for name in _SWITCHES):
        if ignored is None:
            raise InvalidRequest("This model always thinks.", param="thinking")
        ignored.add("thinking")


async def message_prompts(asked: MessagesRequest, services: PromptServices, ignored: IgnoredFields | None) -> Prompts:
    """Return the one prompt of a message. Raises InvalidRequest."""
    chat_body, chat = await _translated(asked, ignored, services, sampling_fields(asked))
    with chat_body.naming_own_fields():
        return await _prompts(chat, services)


async def count_answer(asked: PromptFields, services: PromptServices, ignored: IgnoredFields | None) -> bytes:
    """Return the answer that has the number of tokens of the prompt, however long. Raises InvalidRequest."""
    chat_body, chat = await _translated(asked, ignored, services, {})
    with chat_body.naming_own_fields():
        return orjson.dumps({"input_tokens": len((await encode_chat(chat, services)).token_ids)})


async def _translated(
    asked: PromptFields, ignored: IgnoredFields | None, services: PromptServices, others: dict[str, Any]
) -> tuple[ChatBody, ChatCompletionRequest]:
    length = rough_length(asked)
    chat_body = await services.lanes.run(length, lambda: chat_body_of(asked, BodyParser(ignored)))
    with chat_body.naming_own_fields():
        chat = await services.lanes.run(length, lambda: parse_chat(chat_body.fields | others))
    return chat_body, chat


async def _prompts(chat: ChatCompletionRequest, services: PromptServices) -> Prompts:
    try:
        return await chat_prompts(chat, services)
    except ContextTooLong as error:
        raise _prompt_too_long(error.num_tokens, services) from error


def _prompt_too_long(num_tokens: int | None, services: PromptServices) -> ContextTooLong:
    """Return the error in the words by which clients know that they must shorten their conversation.

    `num_tokens`: that it has at least.
    """
    limit = services.model.max_context_len - 1
    return ContextTooLong(f"prompt is too long: {num_tokens} tokens > {limit} maximum")
