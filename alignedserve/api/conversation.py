"""What a client asks for, whatever API it speaks: a conversation, and the answer to it.

A translator of each API makes both out of a body. Every part carries its path in that body: errors name the client's
own field by construction."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import orjson

from alignedserve.api.errors import refuse
from alignedserve.core.errors import InvalidRequest
from alignedserve.runtime.grammar.constraints import StructuredOutputs

MAX_PARTS = 1024  # of a message
MAX_CALLS = 128  # of a message
MAX_TOOLS = 128
MAX_CALL_ID_LEN = 256
FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,128}$"
_NAME = re.compile(FUNCTION_NAME)
_MAX_ARGUMENTS_DEPTH = 32
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

ToolMode = Literal["none", "auto", "required"]
Role = Literal["system", "user", "assistant", "tool"]


class FieldNames(NamedTuple):
    """What errors call the fields of a body; chat completions have the default ones."""

    messages: str = "messages"
    tool_choice: str = "tool_choice"
    effort: str = "reasoning_effort"
    thinking_budget: str = "thinking_token_budget"
    answer_format: str = "response_format"


_CHAT_NAMES = FieldNames()


class NamedPicture(NamedTuple):
    """A picture of a message: a data URL, or where it is."""

    url: str
    path: str
    kind_path: str  # of the part's type


class PastCall(NamedTuple):
    """A call that the assistant made."""

    call_id: str
    name: str
    arguments: dict[str, Any]
    is_cut: bool = False  # by a limit of tokens, perhaps: it may have no result

    @classmethod
    def of(cls, call_id: str, name: str, arguments: str | dict[str, Any], *, is_cut: bool = False) -> "PastCall":
        """Return a call, whose arguments may be JSON text. Empty or deep arguments, and no object, count as cut."""
        try:
            value = orjson.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except orjson.JSONDecodeError:
            value = None
        whole = value if isinstance(value, dict) and _is_shallow(value) else None
        return cls(call_id, name, whole or {}, is_cut or not arguments or whole is None)


class PastMessage(NamedTuple):
    """One message of a conversation."""

    role: Role
    path: str
    parts: tuple[str | NamedPicture, ...] = ()
    calls: tuple[PastCall, ...] = ()  # of an assistant
    thought: str | None = None  # likewise
    call_id: str | None = None  # of a tool's result
    name: str | None = None  # of the participant; templates may show it
    has_chat_members: bool = False  # the client's message has the members of a chat completion's

    @property
    def text(self) -> str:
        """Return the texts, each on lines of its own."""
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @property
    def pictures(self) -> list[NamedPicture]:
        return [part for part in self.parts if isinstance(part, NamedPicture)]

    def at(self, member: str) -> str:
        """Return the path of a member, as chat completions call it; other bodies name the whole message."""
        return self.path + member if self.has_chat_members else self.path


class OfferedTool(NamedTuple):
    """A function of the client that the answer may call."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None  # a JSON schema; None: no parameters
    path: str
    schema_path: str  # of the parameters
    is_strict: bool = False  # calls are held to all of the parameters; else they are a hint

    def as_template_tool(self) -> dict[str, Any]:
        description = {} if self.description is None else {"description": self.description}
        function = {"name": self.name} | description | {"parameters": self.parameters or _NO_PARAMETERS}
        return {"type": "function", "function": function}


class ToolChoice(NamedTuple):
    """The tools that an answer may call, and if it may, must or must not."""

    mode: ToolMode = "auto"
    names: tuple[str, ...] | None = None  # None: any of the tools
    unknown: tuple[tuple[str, ...], ...] = ()  # members of the client's field that nobody knows


_ANY_TOOL = ToolChoice()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What decides the prompt of a chat, and the calls and the thought of its answer."""

    messages: tuple[PastMessage, ...]
    tools: tuple[OfferedTool, ...] = ()
    tool_choice: ToolChoice = _ANY_TOOL
    has_parallel_calls: bool = True
    effort: str | None = None  # of thinking
    thinking_budget: int | None = None  # tokens of the thought
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    begins_answer: bool = True  # the prompt ends where an answer begins
    continues_last: bool = False  # the answer goes on with the last message, whose turn is not ended
    names: FieldNames = _CHAT_NAMES


class Constraint(NamedTuple):
    """A constraint of the answer, and the field that sets it."""

    outputs: StructuredOutputs
    param: str


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """What an answer is to be: limits, sampling, form, terms. Fields that a body lacks are None or their defaults."""

    id_prefix: str
    prompt_param: str  # the field that the prompt is in
    response_id: str | None = None  # None: the prefix before the request's id
    max_tokens: int | None = None  # refused where the context has no room for them
    max_fitting_tokens: int | None = None  # the limit without `max_tokens`, cut to the context; None: all of it
    n: int = 1
    stream: bool = False
    includes_usage: bool = False  # streams only
    has_continuous_usage: bool = False
    constraint: Constraint | None = None
    has_free_blanks: bool = False
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    calls_functions: bool = False  # calls are answered as `function_call`
    # Sampling; None: as the model's makers say.
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: Sequence[str] = ()
    stop_param: str = "stop"
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] = ()
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()
    truncate_prompt_tokens: int | None = None
    # What the answer shows.
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # Terms.
    service_tier: str = "auto"
    priority: int | None = None
    cache_salt: str | None = None
    keep_alive: str | int | float | None = None

    @classmethod
    def of(cls, body: object, **others: Any) -> "AnswerSpec":
        """Copy the body's fields of equal names; `others` overrule."""
        same = {name: value for name in _SPEC_FIELDS if (value := getattr(body, name, None)) is not None}
        return cls(**(same | others))


_SPEC_FIELDS = tuple(spec_field.name for spec_field in fields(AnswerSpec))


def check_conversation(conversation: Conversation) -> Conversation:
    """Return the conversation. Raises InvalidRequest, naming the field, unless its parts fit each other. The results of
    an assistant's calls follow the calls at once, one for each, in any order; cut calls may have none. Two tools never
    have the same name, and the choice names tools that are there."""
    open_calls: dict[str, PastCall] = {}
    for message in conversation.messages:
        if message.role == "tool":
            if open_calls.pop(message.call_id or "", None) is None:
                refuse(message.at(".tool_call_id"), f"no call before it has the id {message.call_id!r}")
        elif needed := _needed(open_calls):
            problem = f"the call {needed!r} before it has no result yet, which must follow it at once"
            refuse(message.at(".role"), problem)
        else:
            open_calls = _calls_by_id(message)
    if needed := _needed(open_calls):
        refuse(conversation.names.messages, f"the call {needed!r} has no result, which must follow it")
    _check_tools(conversation.tools, conversation.tool_choice, conversation.names.tool_choice)
    return conversation


def _needed(calls: Mapping[str, PastCall]) -> str | None:
    return min((call_id for call_id, call in calls.items() if not call.is_cut), default=None)


def _calls_by_id(message: PastMessage) -> dict[str, PastCall]:
    _check_count(message.parts, MAX_PARTS, message.at(".content"))
    _check_count(message.calls, MAX_CALLS, message.at(".tool_calls"))
    calls: dict[str, PastCall] = {}
    for index, call in enumerate(message.calls):
        _check_name(call.name, message.at(f".tool_calls[{index}].function.name"))
        if not 1 <= len(call.call_id) <= MAX_CALL_ID_LEN:
            bound = "least 1 character" if not call.call_id else f"most {MAX_CALL_ID_LEN} characters"
            refuse(message.at(f".tool_calls[{index}].id"), f"String should have at {bound}")
        if call.call_id in calls:
            refuse(message.at(f".tool_calls[{index}].id"), "two calls of one message have it")
        calls[call.call_id] = call
    return calls


def _check_tools(tools: Sequence[OfferedTool], choice: ToolChoice, param: str) -> None:
    _check_count(tools, MAX_TOOLS, "tools")
    names: set[str] = set()
    for tool in tools:
        _check_name(tool.name, f"{tool.path}.name")
        if tool.name in names:
            path = f"{tool.path}.name"
            raise InvalidRequest("Two tools have the same name.", param=path, code="invalid_value")
        names.add(tool.name)
    if choice.mode == "required" and not tools:
        raise InvalidRequest(f"{param} needs tools.", param=param, code="invalid_value")
    if not names.issuperset(choice.names or ()):
        raise InvalidRequest(f"{param} names a tool that is not in tools.", param=param, code="invalid_value")


def _check_name(name: str, path: str) -> None:
    if _NAME.fullmatch(name) is None:
        refuse(path, f"String should match pattern '{FUNCTION_NAME}'")


def _check_count(items: Sequence[object], at_most: int, path: str) -> None:
    if len(items) > at_most:
        refuse(path, f"List should have at most {at_most} items after validation, not {len(items)}")


def _is_shallow(value: Any, depth: int = _MAX_ARGUMENTS_DEPTH) -> bool:
    if not isinstance(value, dict | list):
        return True
    children = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(child, depth - 1) for child in children)


def template_messages(messages: Sequence[PastMessage]) -> list[dict[str, Any]]:
    """Return the messages of a checked conversation for chat templates; results get the name of their function. Cut
    calls without a result are left out."""
    names: dict[str, str] = {}
    shown = []
    for message in _without_open_calls(messages):
        names |= {call.call_id: call.name for call in message.calls}
        shown.append(_template_message(message, names))
    return shown


def _without_open_calls(messages: Sequence[PastMessage]) -> list[PastMessage]:
    results: set[str | None] = set()  # right behind the message
    answered: list[PastMessage] = []
    for message in reversed(messages):
        calls = tuple([call for call in message.calls if not call.is_cut or call.call_id in results])
        answered.append(message._replace(calls=calls))
        results = results | {message.call_id} if message.role == "tool" else set()
    return answered[::-1]


def _template_message(message: PastMessage, names: Mapping[str, str]) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.pictures:
        shown["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in message.parts
        ]
    if message.name is not None:
        shown["name"] = message.name
    if message.calls:
        shown["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.thought:
        shown["reasoning_content"] = message.thought
    if message.call_id is not None:
        shown |= {"tool_call_id": message.call_id, "name": names.get(message.call_id, "")}
    return shown
