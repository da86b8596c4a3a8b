"""Translates items into a conversation, and builds the request that generates a response.

| items | messages |
|---|---|
| instructions, system and developer messages at the beginning | one system message |
| a thought, an answer and calls that follow each other | one assistant message |
| function_call_output | a tool message |

Stored responses of one client, and their items that a new response continues or refers to."""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
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
from alignedserve.api.errors import NotFound, refuse, refuse_missing, refuse_unknown
from alignedserve.api.models.model_services import ModelServices, PromptServices
from alignedserve.api.openai.prompt_encoding import Prompts, encode_chat
from alignedserve.api.openai.request_builder import Arrival, GenerationRequest, build_chat_request
from alignedserve.api.responses.bodies import (
    CreateResponseRequest,
    ResponseFields,
    chat_name,
    known_fields,
    offered_functions,
)
from alignedserve.api.responses.items import Item, item_id, parsed_response_id, parts_of, place_of, text_of
from alignedserve.api.work_lanes import rough_length
from alignedserve.batches.responses.response_repository import MAX_RECORD_BYTES, ResponseRepository, StoredResponse
from alignedserve.config.sections import GatewayConfig
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
    """Return what is built from most turns, found by halving. Raises ContextTooLong if the last one is too long. A turn
    begins with a message of the user, so that no call loses its output. System messages at the beginning stay."""
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


PREVIOUS = "previous_response_id"
Find = Callable[[str], Awaitable[StoredResponse]]
_MAX_CONTEXT_BYTES = 16_000_000  # of the stored responses that one more may continue
_MAX_REFERENCED = 16  # stored responses to whose items one input may refer


@dataclass(frozen=True, slots=True)
class ResponseState:
    """Reads and writes the responses of one client. Every method raises StoreUnavailable while the store is down."""

    repository: ResponseRepository
    config: GatewayConfig
    owner: str

    @property
    def max_turns(self) -> int:
        """Return how many stored responses one more may continue."""
        return self.config.max_response_turns

    async def find(self, text: str, *, param: str = "response_id") -> StoredResponse:
        """Return a response. Raises NotFound."""
        response_id = parsed_response_id(text)
        if response_id is None:
            raise _not_found(param)
        return (await self.find_all([response_id], param=param))[0]

    async def find_all(self, response_ids: Sequence[str], *, param: str) -> list[StoredResponse]:
        """Return responses in order. Raises NotFound if any is gone."""
        stored = await self.repository.find(self.owner, list(response_ids))
        records = [record for record in stored if record is not None]
        if len(records) < len(stored):
            raise _not_found(param)
        return records

    async def add(self, record: StoredResponse) -> None:
        """Keep a new response. Raises InvalidRequest where it is too large for that."""
        await self.repository.add(record, now=time.time(), max_bytes=self.config.max_responses_bytes)


def raw_json(value: Any) -> msgspec.Raw:
    """Return a value as it is stored."""
    return msgspec.Raw(orjson.dumps(value))


def items_of(record: StoredResponse) -> list[Item]:
    """Return the items of a response's own input."""
    items: list[Item] = orjson.loads(bytes(record.items))
    return items


def check_storable(items: Sequence[Item]) -> None:
    """Raise InvalidRequest for an input that is too large to be kept with an answer to it."""
    if len(orjson.dumps(items)) > MAX_RECORD_BYTES // 2:
        raise InvalidRequest("input is too large to be stored; set store to false.", param="store")


def _not_found(param: str) -> NotFound:
    code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
    return NotFound("No such response.", param=param, code=code)


class Context(NamedTuple):
    """What a response continues."""

    items: list[Item]  # inputs and outputs of all ancestors
    ancestors: tuple[str, ...] = ()  # the first one first
    num_bytes: int = 0  # in the store


async def load_context(state: ResponseState, previous: StoredResponse) -> Context:
    """Return all turns up to a response. Raises NotFound, or InvalidRequest for a conversation that is too long."""
    if previous.batch_id is not None:
        message = "The previous response is not over yet."
        raise InvalidRequest(message, param=PREVIOUS, code="previous_response_in_progress")
    if previous.conversation_id is not None:
        message = "The previous response is part of a conversation; continue that by its id."
        raise InvalidRequest(message, param=PREVIOUS, code="response_in_conversation")
    if len(previous.ancestors) >= state.max_turns or previous.context_bytes > _MAX_CONTEXT_BYTES:
        message = f"A conversation may have {state.max_turns} stored responses and {_MAX_CONTEXT_BYTES} bytes."
        raise InvalidRequest(message, param=PREVIOUS, code="context_length_exceeded")
    turns = [*await state.find_all(previous.ancestors, param=PREVIOUS), previous]
    items = [item for turn in turns for item in (*items_of(turn), *output_of(turn))]
    return Context(items, (*previous.ancestors, previous.response_id), previous.context_bytes)


async def resolve_references(find: Find | None, items: Sequence[Item], response_id: str) -> list[Item]:
    """Return the items with every reference replaced by its item. Raises NotFound, InvalidRequest.

    `find`: returns the response of an id; None: there are none."""
    places = [place_of(item["id"]) for item in items if item["type"] == "item_reference"]
    wanted = list(dict.fromkeys(item_place.response_id for item_place in places if item_place is not None))
    if len(wanted) > _MAX_REFERENCED:
        raise InvalidRequest(f"input refers to items of more than {_MAX_REFERENCED} responses.", param="input")
    turns = {} if find is None else {response_id: await find(response_id) for response_id in wanted}
    return [
        _resolved(item, turns, response_id, index) if item["type"] == "item_reference" else item
        for index, item in enumerate(items)
    ]


def _resolved(item: Item, turns: Mapping[str, StoredResponse], response_id: str, index: int) -> Item:
    item_place = place_of(item["id"])
    if item_place is not None and item_place.response_id in turns:
        turn = turns[item_place.response_id]
        known = items_of(turn) if item_place.is_input else output_of(turn)
        if item_place.place < len(known):
            item_there = known[item_place.place]
            return item_there | {"id": item_id(item_there["type"], response_id, index, is_input=True)}
    raise NotFound("An item that input refers to does not exist.", param="input", code="item_not_found")


def output_of(record: StoredResponse) -> list[Item]:
    """Return the items that a response consists of."""
    output: list[Item] = orjson.loads(bytes(record.response))["output"]
    return output
