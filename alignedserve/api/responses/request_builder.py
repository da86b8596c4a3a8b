"""Translates items into a conversation, and builds the request that generates a response.

| items | messages |
|---|---|
| instructions, system and developer messages at the beginning | one system message |
| a thought, an answer and calls that follow each other | one assistant message |
| function_call_output | a tool message |
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import orjson

from alignedserve.api.conversation import (
    MAX_TOOLS,
    AnswerSpec,
    Constraint,
    Conversation,
    FieldNames,
    OfferedTool,
    PastCall,
    PastMessage,
    Role,
    ToolChoice,
    check_conversation,
)
from alignedserve.api.errors import refuse, refuse_missing, refuse_unknown
from alignedserve.api.models.model_card import PromptServices
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation_request import Arrival, GenerationRequest
from alignedserve.api.openai.prompt_encoding import Prompts, encode_chat
from alignedserve.api.openai.request_builder import build_chat_request
from alignedserve.api.responses.bodies import (
    CreateResponseRequest,
    ResponseFields,
    chat_name,
    known_fields,
    offered_functions,
)
from alignedserve.api.responses.items import Item, parts_of, text_of
from alignedserve.api.work_lanes import rough_length
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.runtime.grammar.constraints import StructuredOutputs

T = TypeVar("T")

_SYSTEM_ROLES = ("system", "developer")
_NAMES = FieldNames(messages="input", effort="reasoning.effort", answer_format="text.format")
_TOOL_CHOICE_FORMS = (
    "Input must be 'none', 'auto', 'required', {type: 'function', name} or {type: 'allowed_tools', mode, tools}"
)
LOGPROBS = "message.output_text.logprobs"


def new_response_id() -> str:
    """Make a random id of a response that cannot be guessed."""
    return f"resp_{secrets.token_hex(16)}"


async def build_response_request(
    body: CreateResponseRequest, items: Sequence[Item], response_id: str, arrival: Arrival, services: ModelServices
) -> GenerationRequest:
    """Return the request for a response to these items, earlier turns first. Raises InvalidRequest."""
    spec = response_spec(body, response_id)

    async def build(remaining: Sequence[Item]) -> GenerationRequest:
        return await build_chat_request(await _translated(body, remaining, services), spec, arrival, services)

    return await (build_truncated(build, items) if body.truncation == "auto" else build(items))


async def response_prompts(body: CreateResponseRequest, items: Sequence[Item], services: PromptServices) -> Prompts:
    """Return the one prompt of these items. Raises InvalidRequest."""
    return (await encode_chat(await _translated(body, items, services), services, is_bounded=True),)


async def input_tokens_answer(body: ResponseFields, items: Sequence[Item], services: PromptServices) -> bytes:
    """Return the answer that has the length of the prompt in tokens. Raises InvalidRequest."""
    prompt = await encode_chat(await _translated(body, items, services), services)
    return orjson.dumps({"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)})


async def _translated(body: ResponseFields, items: Sequence[Item], services: PromptServices) -> Conversation:
    return await services.lanes.run(rough_length(items), partial(conversation_of_items, body, items))


async def build_truncated(build: Callable[[Sequence[Item]], Awaitable[T]], items: Sequence[Item]) -> T:
    """Return what is built from most turns, found by halving. Raises ContextTooLong if the last one is too long.

    A turn begins with a message of the user, so that no call loses its output. System messages at the beginning stay.
    """
    num_kept = num_system_items(items)
    starts = [num_kept] + [index for index in range(num_kept + 1, len(items)) if items[index].get("role") == "user"]

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


def conversation_of_items(body: ResponseFields, items: Sequence[Item]) -> Conversation:
    """Return the conversation, checked. Raises InvalidRequest, for an empty input too."""
    messages = messages_of(items, body.instructions)
    if not messages:
        raise InvalidRequest("input is missing.", param="input", code="missing_required_parameter")
    _constraint(body)
    reasoning = body.reasoning
    conversation = Conversation(
        tuple(messages), effort=reasoning.effort if reasoning is not None else None, names=_NAMES
    )
    if body.tools or body.tool_choice not in ("auto", "none"):
        conversation = replace(
            conversation,
            tools=tuple(
                OfferedTool(
                    offered.chat_name,
                    offered.tool.description,
                    offered.tool.parameters,
                    offered.path,
                    f"{offered.path}.parameters",
                    offered.tool.strict is True,
                )
                for offered in offered_functions(body.tools)
            ),
            tool_choice=_tool_choice(body.tool_choice),
            has_parallel_calls=body.parallel_tool_calls,
        )
    return check_conversation(conversation)


def messages_of(items: Sequence[Item], instructions: str | None) -> list[PastMessage]:
    num_system = num_system_items(items)
    system = [instructions] if instructions is not None else []
    system += [text_of(item["content"]) for item in items[:num_system]]
    messages = [PastMessage("system", "input", ("\n\n".join(system),))] if system else []
    for item in items[num_system:]:
        match item["type"]:
            case "message" if item["role"] != "assistant":
                role: Role = "system" if item["role"] in _SYSTEM_ROLES else "user"
                messages.append(PastMessage(role, "input", parts_of(item["content"])))
            case "function_call_output":
                messages.append(PastMessage("tool", "input", (text_of(item["output"]),), call_id=item["call_id"]))
            case kind:
                if not messages or _is_over(messages[-1], kind):
                    messages.append(PastMessage("assistant", "input"))
                messages[-1] = _with_answer(messages[-1], item)
    return messages


def num_system_items(items: Sequence[Item]) -> int:
    return next((index for index, item in enumerate(items) if item.get("role") not in _SYSTEM_ROLES), len(items))


def _is_over(last: PastMessage, kind: str) -> bool:
    """Return whether an item of this type begins an assistant's turn: a turn with calls ends where results follow."""
    has_answered = bool(last.parts) and not last.calls
    return last.role != "assistant" or (kind != "function_call" and has_answered)


def _with_answer(message: PastMessage, item: Item) -> PastMessage:
    match item["type"]:
        case "message":
            return message._replace(parts=(*message.parts, text_of(item["content"])))
        case "reasoning":
            thought = text_of(item["content"] or item["summary"])
            return message._replace(thought="\n".join(filter(None, [message.thought, thought])) or None)
    name, is_cut = chat_name(item["name"], item.get("namespace")), item["status"] == "incomplete"
    call = PastCall.of(item["call_id"], name, item["arguments"], is_cut=is_cut)
    return message._replace(calls=(*message.calls, call))


def _tool_choice(choice: str | dict[str, Any]) -> ToolChoice:
    if isinstance(choice, dict):
        members = _members_of_type(choice)
        for name in ("name", "mode", "tools"):
            if name not in members and choice.get(name) is not None:
                refuse_unknown(f"tool_choice.{name}")
    match choice:
        case "none" | "auto" | "required":
            return ToolChoice(choice)
        case {"type": "function", "name": str(name)}:
            return ToolChoice("required", (name,))
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [_, *_] as tools}:
            choices = [tool for tool in tools if isinstance(tool, dict) and "name" in _members_of_type(tool)]
            names = [tool["name"] for tool in choices if isinstance(tool.get("name"), str)]
            if len(names) == len(tools) <= MAX_TOOLS:
                return ToolChoice(mode, tuple(names))
    return refuse("tool_choice", _TOOL_CHOICE_FORMS)


def _members_of_type(choice: dict[str, Any]) -> tuple[str, ...]:
    match choice.get("type"):
        case "function":
            return ("name",)
        case "allowed_tools":
            return ("mode", "tools")
    raise InvalidRequest(
        "tool_choice.type must be function or allowed_tools.", param="tool_choice.type", code="unsupported_parameter"
    )


def _constraint(body: ResponseFields) -> Constraint | None:
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    if form.type == "json_schema":
        if form.schema_ is None:
            refuse_missing("text.format.schema")
        return Constraint(StructuredOutputs(json=form.schema_), "text.format.schema")
    for name in known_fields(form, with_unset=False):
        if name != "type":
            refuse_unknown(f"text.format.{name}")
    return Constraint(StructuredOutputs(json_object=True), "text.format") if form.type == "json_object" else None


def response_spec(body: CreateResponseRequest, response_id: str) -> AnswerSpec:
    """Return what the answer is to be. Raises InvalidRequest."""
    has_logprobs = LOGPROBS in body.include
    if body.top_logprobs and not has_logprobs:
        raise InvalidRequest(f"top_logprobs needs {LOGPROBS!r} in include.", param="top_logprobs")
    return AnswerSpec.of(
        body,
        id_prefix="resp_",
        response_id=response_id,
        prompt_param="input",
        max_tokens=body.max_output_tokens,
        num_logprobs=(body.top_logprobs or 0) if has_logprobs else None,
        constraint=_constraint(body),
    )
