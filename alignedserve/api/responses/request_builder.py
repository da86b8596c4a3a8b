"""Translates items into a chat completion, and builds the request that generates a response.

| items | messages |
|---|---|
| instructions, system and developer messages at the beginning | one system message |
| a thought, an answer and calls that follow each other | one assistant message |
| function_call_output | a tool message |
"""

import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson

from alignedserve.api.models.model_card import PromptServices
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation_request import Arrival, GenerationRequest
from alignedserve.api.openai.parsing import parse_chat
from alignedserve.api.openai.prompt_encoding import Prompts, chat_prompts, encode_chat
from alignedserve.api.openai.request_builder import build_chat_request
from alignedserve.api.openai.schemas.requests import ChatCompletionRequest
from alignedserve.api.openai.schemas.tools import TOOL_CHOICE_FORMS
from alignedserve.api.responses.items import Item, content_of, text_of
from alignedserve.api.responses.parsing import OfferedFunction, chat_name, offered_functions
from alignedserve.api.responses.schemas import CreateResponseRequest, PromptFields, TextFormat, known_fields
from alignedserve.api.work_lanes import rough_length
from alignedserve.core.errors import ContextTooLong, InvalidRequest

T = TypeVar("T")

Message = dict[str, Any]
_SYSTEM_ROLES = ("system", "developer")
_SAME_FIELDS = (
    *("temperature", "top_p", "stream", "service_tier", "user", "safety_identifier", "prompt_cache_key", "seed"),
    *("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "priority", "cache_salt"),
)
_TOOL_CHOICE_FORMS = (
    "must be 'none', 'auto', 'required', {type: 'function', name} or {type: 'allowed_tools', mode, tools}"
)
# Of names of chat completions: what the Responses API calls them. The first that fits is taken.
_NAMES = (
    (re.compile(re.escape(TOOL_CHOICE_FORMS)), _TOOL_CHOICE_FORMS),
    (re.compile(r"\bmessages(\[\d+\][\w.\[\]]*)?"), "input"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\bverbosity\b"), "text.verbosity"),
    (re.compile(r"\b(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
)
_TOOL = re.compile(r"\btools\[(\d+)\]")
LOGPROBS = "message.output_text.logprobs"


def new_response_id() -> str:
    """Make a random id of a response that cannot be guessed."""
    return f"resp_{secrets.token_hex(16)}"


async def build_response_request(
    asked: CreateResponseRequest, items: Sequence[Item], response_id: str, arrival: Arrival, services: ModelServices
) -> GenerationRequest:
    """Return the request for a response to these items, earlier turns first. Raises InvalidRequest."""

    async def build(kept: Sequence[Item]) -> GenerationRequest:
        chat = await _translated(asked, kept, services)
        return await build_chat_request(
            chat, arrival, services, response_id=response_id, effort_name="reasoning.effort"
        )

    with _named_as_asked(asked):
        is_truncated = asked.truncation == "auto"
        return await (build_truncated(build, items) if is_truncated else build(items))


async def response_prompts(asked: CreateResponseRequest, items: Sequence[Item], services: PromptServices) -> Prompts:
    """Return the one prompt of these items. Raises InvalidRequest."""
    with _named_as_asked(asked):
        return await chat_prompts(await _translated(asked, items, services), services)


async def input_tokens_answer(asked: PromptFields, items: Sequence[Item], services: PromptServices) -> bytes:
    """Return the answer that has the length of the prompt in tokens. Raises InvalidRequest."""
    with _named_as_asked(asked):
        prompt = await encode_chat(await _translated(asked, items, services), services)
    return orjson.dumps({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


async def _translated(asked: PromptFields, items: Sequence[Item], services: PromptServices) -> ChatCompletionRequest:
    model = {"model": services.model.name}
    return await services.lanes.run(rough_length(items), lambda: parse_chat(chat_body(asked, items) | model))


@contextmanager
def _named_as_asked(asked: PromptFields) -> Iterator[None]:
    def named(text: str) -> str:
        # A chat's tools are all functions, those of namespaces among them.
        paths = dict(enumerate(one.path for one in offered_functions(asked.tools)))
        return _TOOL.sub(lambda found: paths.get(int(found[1]), found[0]), name_as_asked(text))

    try:
        yield
    except InvalidRequest as error:
        error.param = None if error.param is None else named(error.param)
        error.args = (named(str(error)),)
        raise


async def build_truncated(build: Callable[[Sequence[Item]], Awaitable[T]], items: Sequence[Item]) -> T:
    """Return what is built from most turns, found by halving. Raises ContextTooLong if the last one is too long.

    A turn begins with a message of the user, so that no call loses its output. System messages at the beginning stay.
    """
    num_kept = num_system_items(items)
    starts = [num_kept] + [place for place in range(num_kept + 1, len(items)) if items[place].get("role") == "user"]

    async def build_from(turn: int) -> T:
        return await build([*items[:num_kept], *items[starts[turn] :]])

    try:
        return await build(items)
    except ContextTooLong:
        too_early, fitting = 0, len(starts) - 1
    built = await build_from(fitting)
    while fitting - too_early > 1:
        middle = (too_early + fitting) // 2
        try:
            built, fitting = await build_from(middle), middle
        except ContextTooLong:
            too_early = middle
    return built


def chat_body(asked: PromptFields, items: Sequence[Item]) -> dict[str, Any]:
    """Return the body; JSON null stands for what is unset. Raises InvalidRequest for an empty input."""
    messages = messages_of(items, asked.instructions)
    if not messages:
        raise InvalidRequest("input is missing.", param="input", code="missing_required_parameter")
    body = {"model": asked.model, "messages": messages} | _tool_fields(asked)
    if asked.text is not None:
        body |= {"verbosity": asked.text.verbosity, "response_format": _response_format(asked.text.format)}
    if asked.reasoning is not None:
        body["reasoning_effort"] = asked.reasoning.effort
    return body | _output_fields(asked) if isinstance(asked, CreateResponseRequest) else body


def messages_of(items: Sequence[Item], instructions: str | None) -> list[Message]:
    num_system = num_system_items(items)
    system = [instructions] if instructions is not None else []
    system += [text_of(item["content"]) for item in items[:num_system]]
    messages = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return messages + _later_messages(items[num_system:])


def num_system_items(items: Sequence[Item]) -> int:
    return next((place for place, item in enumerate(items) if item.get("role") not in _SYSTEM_ROLES), len(items))


def _later_messages(items: Sequence[Item]) -> list[Message]:
    messages: list[Message] = []
    for item in items:
        match item["type"]:
            case "message" if item["role"] != "assistant":
                messages.append({"role": item["role"], "content": content_of(item["content"])})
            case "function_call_output":
                output = text_of(item["output"])
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
            case "function_call" if item["status"] == "incomplete":
                # The limit of tokens cut it short: it has no result, and its arguments may be none. The turn stays.
                _assistant(messages, "function_call")
            case kind:
                _add_answer(_assistant(messages, kind), item)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:  # a thought without an answer
            message["content"] = ""
    return messages


def _assistant(messages: list[Message], kind: str) -> Message:
    """Return the assistant message that an item of this type belongs to: the last one, unless its turn is over.

    A turn with calls is over when their results follow.
    """
    last = messages[-1] if messages else {}
    is_over = last.get("content") is not None and "tool_calls" not in last
    if last.get("role") != "assistant" or (kind != "function_call" and is_over):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _add_answer(message: Message, item: Item) -> None:
    match item["type"]:
        case "message":
            before = [] if message["content"] is None else [message["content"]]
            message["content"] = "\n".join([*before, text_of(item["content"])])
        case "reasoning":
            thought = text_of(item["content"] or item["summary"])
            if thought:
                message["reasoning_content"] = "\n".join(filter(None, [message.get("reasoning_content"), thought]))
        case _:
            function = {"name": chat_name(item["name"], item.get("namespace")), "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)


def _tool_fields(asked: PromptFields) -> dict[str, Any]:
    if not asked.tools and asked.tool_choice in ("auto", "none"):
        return {}
    return {
        "tools": [_function_tool(one) for one in offered_functions(asked.tools)],
        "tool_choice": _tool_choice(asked.tool_choice),
        "parallel_tool_calls": asked.parallel_tool_calls,
    }


def _function_tool(offered: OfferedFunction) -> dict[str, Any]:
    function = known_fields(offered.tool, with_unset=False) | {"name": offered.chat_name}
    return {"type": function.pop("type"), "function": function}


def _tool_choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    rest = {name: choice[name] for name in ("name", "mode", "tools") if name in choice}
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": rest}
        case "allowed_tools":
            tools = choice.get("tools")
            if isinstance(tools, list):  # what is no tool is refused in its place
                rest["tools"] = [_tool_choice(tool) if isinstance(tool, dict) else tool for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": rest}
    raise InvalidRequest(
        "tool_choice.type must be function or allowed_tools.", param="tool_choice.type", code="unsupported_parameter"
    )


def _response_format(given: TextFormat | None) -> dict[str, Any] | None:
    if given is None:
        return None
    members = known_fields(given, with_unset=False)
    kind = members.pop("type")
    return {"type": kind, "json_schema": members} if kind == "json_schema" else {"type": kind} | members


def _output_fields(asked: CreateResponseRequest) -> dict[str, Any]:
    fields = {name: getattr(asked, name) for name in _SAME_FIELDS}
    has_logprobs = LOGPROBS in asked.include
    if asked.top_logprobs and not has_logprobs:
        raise InvalidRequest(f"top_logprobs needs {LOGPROBS!r} in include.", param="top_logprobs")
    return fields | {
        "max_completion_tokens": asked.max_output_tokens,
        "logprobs": has_logprobs,
        "top_logprobs": asked.top_logprobs if has_logprobs else None,
    }


def name_as_asked(text: str) -> str:
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text
