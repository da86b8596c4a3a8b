"""Renders conversations by a model's own jinja2 template, as transformers does, in a sandbox of bounded time.

What a template knows is found out, not configured: `variables` are the names that it reads (`tools`,
`enable_thinking`, `reasoning_effort`), and the form in which it shows earlier tool calls is the first of a few that
it renders whole.
"""

import json
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from typing_extensions import override

from alignedserve.core.errors import InvalidRequest, UnsupportedModel

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for a model's chat template, and what the template shall make of it."""

    messages: Sequence[Message]  # in OpenAI's shape; arguments of calls are objects, not text
    tools: Tools = ()
    variables: Mapping[str, Any] = field(default_factory=dict)  # further ones of the template
    add_generation_prompt: bool = True  # the prompt ends where an answer begins
    continue_final_message: bool = False  # the last message is left open, and no answer begins
    picture_mark: str = ""  # what the template writes for each picture
    picture_texts: tuple[str, ...] = ()  # what is put there for each of them
    param: str = "messages"  # the client's field that errors name

    @property
    def begins_answer(self) -> bool:
        """Return whether the template writes the beginning of the assistant's answer."""
        return self.add_generation_prompt and not self.continue_final_message


MAX_LENGTH = 100_000_000  # of a text or list that a template makes
_MAX_POWER_BITS = 10_000
_ends_s: ContextVar[float] = ContextVar("the time of its thread at which a rendering ends")


@contextmanager
def within_s(limit_s: float) -> Iterator[None]:
    """Refuse templates that compute for longer than `limit_s`, waits not counted, with jinja2.TemplateError."""
    token = _ends_s.set(time.thread_time() + limit_s)
    try:
        yield
    finally:
        _ends_s.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that stop when the time given by `within_s` is over.

    Jinja2's sandbox bounds no time: nested loops, macros that call themselves or `9**9**9` hold a thread for ever. Here
    every step of a loop and every call looks at the computed time, and operators are bounded before they compute.
    """

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.step = object()  # what the steps of loops call
        self.binop_table |= {"+": _sum, "*": _product, "**": _power}

    @override
    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Watched().visit(source), *args, **kwargs)

    @override
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as in jinja2)
        if time.thread_time() > _ends_s.get():
            raise jinja2.TemplateRuntimeError("it takes too long to render")
        return True if __obj is __self.step else super().call(__context, __obj, *args, **kwargs)

    def joined(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        check_length(sum(map(len, texts)))
        return "".join(texts)


class _Watched(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  (jinja2 finds it by this name)
        self.generic_visit(node)
        step = _call("step", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)


def check_length(length: int) -> None:
    """Raise MemoryError, as a machine would, where a template makes more than MAX_LENGTH."""
    if length > MAX_LENGTH:
        raise MemoryError


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), arguments, [], None, None, lineno=line)


def _sum(left: Any, right: Any) -> Any:
    check_length(_length(left) + _length(right))
    return left + right


def _product(left: Any, right: Any) -> Any:
    for sequence, factor in ((left, right), (right, left)):
        if isinstance(factor, int):
            check_length(_length(sequence) * factor)
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
        raise jinja2.TemplateRuntimeError("it makes a number that is too large")
    return operator.pow(left, right)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


TOOLS = "tools"
ADD_GENERATION_PROMPT = "add_generation_prompt"
RENDER_S = 10.0  # of computing, after which a template is refused; the longest conversations take less than one


class CallForm(NamedTuple):
    """The form in which a template wants the tool calls of an assistant's message."""

    has_text_arguments: bool  # JSON as a string, not as an object
    has_null_content: bool  # beside calls, where there is no text


_CALL_FORMS = (CallForm(False, False), CallForm(True, False), CallForm(False, True), CallForm(True, True))
# What filters and operators of a template raise for values of other kinds or sizes.
_UNRENDERABLE = (
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
_PROBE_S = 1.0
_PROBE_TIME = datetime(2000, 1, 1)
_PROBE_CALL = {
    "id": "probe1234",
    "type": "function",
    "function": {"name": "probe_name", "arguments": {"probe_key": "probe_value"}},
}
_PROBE = (
    {"role": "user", "content": "probe"},
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "tool_call_id": "probe1234", "name": "probe_name", "content": "probe_result"},
)
_PROBE_TOOLS = (
    {
        "type": "function",
        "function": {"name": "probe_name", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
)
_PROBE_TEXT = "probe_text"
_TEXT_PROBE = ({"role": "user", "content": _PROBE_TEXT},)
_PROBE_WORDS = ("probe_name", "probe_key", "probe_value", "probe_result")


class ChatTemplate:
    """One template. `tool_source`: the one for conversations with tools, of models that have two."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        self.source = source if tool_source is None else source + tool_source
        self._template, self.variables = _compiled(source)
        self._tool_template, tool_variables = _compiled(tool_source or source)
        self._special_tokens = dict(special_tokens)
        self.variables |= tool_variables
        # What a client may not set: the conversation itself and what belongs to the model.
        self.reserved = frozenset(self._arguments(ChatPrompt(()), _PROBE_TIME)) | _environment().globals.keys()

    @property
    def knows_tools(self) -> bool:
        """Return whether the template shows tools to the model."""
        return TOOLS in self.variables

    @cached_property
    def wants_parts(self) -> bool:
        """Return whether texts must come as lists of parts: some templates of models that see show no others."""
        return not self._shows_text(in_parts=False) and self._shows_text(in_parts=True)

    @cached_property
    def call_form(self) -> CallForm | None:
        """Return the form of tool calls in messages; None when the template does not show them."""
        return next((form for form in _CALL_FORMS if self._shows_calls(form)), None)

    def render(self, prompt: ChatPrompt, *, now: datetime) -> str:
        """Render the prompt. Raises InvalidRequest with the template's message.

        Variables of the prompt never replace the conversation.
        """
        has_calls = any("tool_calls" in message for message in prompt.messages)
        if has_calls and self.call_form is None:
            raise InvalidRequest("This model's chat template does not show tool calls.", param=prompt.param)
        form = self.call_form if has_calls else None
        arguments = self._arguments(prompt, now)
        return self._render(
            form, arguments, prompt.variables, in_parts=self.wants_parts, limit_s=RENDER_S, param=prompt.param
        )

    def _render(
        self,
        form: CallForm | None,
        arguments: Mapping[str, Any],
        variables: Mapping[str, Any] | None = None,
        *,
        in_parts: bool = False,
        limit_s: float,
        param: str = "messages",
    ) -> str:
        template = self._tool_template if arguments[TOOLS] or form is not None else self._template
        shown = [_in_form(message, form) for message in arguments["messages"]]
        shown = [_in_parts(message) for message in shown] if in_parts else shown
        try:
            with within_s(limit_s):
                return _joined(template.generate(**{**(variables or {}), **arguments, "messages": shown}))
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"The model's chat template refused the {param}: {str(error)[:200]}", param=param
            ) from error
        except _UNRENDERABLE as error:
            raise InvalidRequest(
                f"The model's chat template cannot render these {param} ({type(error).__name__}).", param=param
            ) from error

    def _arguments(self, prompt: ChatPrompt, now: datetime) -> dict[str, Any]:
        return {
            "messages": prompt.messages,
            TOOLS: [dict(tool) for tool in prompt.tools] or None,
            "documents": None,
            ADD_GENERATION_PROMPT: prompt.begins_answer,
            "strftime_now": now.strftime,
            **self._special_tokens,
        }

    def _shows_calls(self, form: CallForm) -> bool:
        try:
            arguments = self._arguments(ChatPrompt(_PROBE, _PROBE_TOOLS), _PROBE_TIME)
            rendered = self._render(form, arguments, in_parts=self.wants_parts, limit_s=_PROBE_S)
        except InvalidRequest:
            return False
        return all(word in rendered for word in _PROBE_WORDS)

    def _shows_text(self, *, in_parts: bool) -> bool:
        try:
            arguments = self._arguments(ChatPrompt(_TEXT_PROBE), _PROBE_TIME)
            rendered = self._render(None, arguments, in_parts=in_parts, limit_s=_PROBE_S)
        except InvalidRequest:
            return False
        return _PROBE_TEXT in rendered


@lru_cache(maxsize=8)  # a start reads each several times, and takes some ten milliseconds to compile it
def _compiled(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    try:
        parsed = _environment().parse(source)
        return _environment().from_string(source), frozenset(meta.find_undeclared_variables(parsed))
    except jinja2.TemplateError as error:
        raise UnsupportedModel(f"the chat template is not valid: {error}") from error
    except (SyntaxError, RecursionError, MemoryError) as error:  # of Python, which jinja2 writes
        raise UnsupportedModel("the chat template is not valid: it is nested too deeply") from error


class _GenerationBlocks(Extension):
    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    @override
    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> jinja2.Environment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _joined(pieces: Iterator[str]) -> str:
    texts, length = [], 0
    for piece in pieces:
        texts.append(piece)
        length += len(piece)
        check_length(length)
    return "".join(texts)


def _in_form(message: Message, form: CallForm | None) -> dict[str, Any]:
    shown = dict(message)
    if form is None or "tool_calls" not in message:
        return shown
    if form.has_null_content and not shown.get("content"):
        shown["content"] = None
    if form.has_text_arguments:
        shown["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
    return shown


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_text_arguments(call: Message) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which a model would see.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
