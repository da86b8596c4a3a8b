"""How families of models write tool calls.

An answer that calls tools is `begin`, `prefix`, its calls with `separator` between them, `suffix`. Control tokens
stand in these texts by their names; the model's tokenizer knows the tokens among them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from alignedserve.config.sections import TOOL_FORMATS
from alignedserve.core.errors import InvalidRequest
from alignedserve.runtime.grammar.constraints import json_value, quoted


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """What a family writes around names and values; `<F>f<FE><P>p<PE>value<VE></F>` of the fields in their order."""

    function: str
    function_name_end: str
    parameter: str
    parameter_name_end: str
    value_end: str
    function_end: str

    def marked(self, marked: Callable[[str], str]) -> "ParameterTags":
        """Return the tags as an answer's text has them; `marked` writes control tokens so."""
        return ParameterTags(
            marked(self.function),
            marked(self.function_name_end),
            marked(self.parameter),
            marked(self.parameter_name_end),
            marked(self.value_end),
            marked(self.function_end),
        )


QWEN3_CODER = ParameterTags("<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>")
GLM45 = ParameterTags("<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>")
_VALUE_ENDS = (QWEN3_CODER.value_end.strip(), GLM45.value_end.strip())

_OF_TEXT = frozenset({"type", "enum", "const", "description", "title", "default", "examples", "deprecated"})
OF_FUNCTIONS = _OF_TEXT | {"properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance"}
_NAME = re.compile(r"[^<>\n]+")

TextParameters = Mapping[str, tuple[str, ...] | None]  # by name: the texts that there are; None: any text


def text_parameters(schema: Mapping[str, Any]) -> dict[str, tuple[str, ...] | None]:
    """Return the parameters of a function that are written as plain text; all others are written as JSON."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    parameters_by_name: dict[str, tuple[str, ...] | None] = {}
    for name, of_one in properties.items():
        if isinstance(of_one, Mapping) and _OF_TEXT.issuperset(of_one):
            texts = of_one.get("enum", [of_one["const"]] if "const" in of_one else None)
            if texts is None and of_one.get("type") == "string":
                parameters_by_name[name] = None
            elif isinstance(texts, list) and texts and all(_is_plain(text) for text in texts):
                parameters_by_name[name] = tuple(texts)
    return parameters_by_name


def is_parameter(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def check_parameters(schema: Mapping[str, Any]) -> None:
    properties = schema.get("properties", {})
    unknown = [name for name in schema if name not in OF_FUNCTIONS]
    unknown += [name for name in schema.get("required", ()) if name not in properties]
    if unknown or not all(map(is_parameter, properties)):
        raise InvalidRequest(
            "in the way this model writes calls, parameters must be an object of named properties",
            code="invalid_json_schema",
        )


def parameters_text(arguments: Mapping[str, Any], tags: ParameterTags) -> str:
    written = [json.dumps(value, ensure_ascii=False) for value in arguments.values()]
    pairs = zip(arguments, written, strict=True)
    return "".join(f"{tags.parameter}{name}{tags.parameter_name_end}{value}{tags.value_end}" for name, value in pairs)


def _is_plain(text: Any) -> bool:
    return isinstance(text, str) and not any(end in text for end in _VALUE_ENDS)


_INTRODUCTION = (
    "You have these tools, one JSON object per line:\n<tools>\n{tools}\n</tools>\n"
    "Use a tool when it is needed to answer. "
)
CALLS_PROMPT = _INTRODUCTION + (
    "To call one, write its name and arguments so, and nothing after it:\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{"the argument": "its value"}}}}\n</tool_call>\n'
    "The result comes between <tool_response> and </tool_response>."
)
LIST_PROMPT = _INTRODUCTION + (
    "To call tools, write a list of calls so, and nothing after it:\n"
    '<tool_call>[{{"name": "the name", "arguments": {{"the argument": "its value"}}}}]</tool_call>\n'
    "The results come between <tool_response> and </tool_response>."
)


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """A call is a JSON object of `name` and its arguments."""

    arguments_key: str = "arguments"

    def before_arguments(self, name: str, index: int = 0) -> str:
        return f'{{"name": "{name}", "{self.arguments_key}": '

    @property
    def after_arguments(self) -> str:
        return "}"


@dataclass(frozen=True, slots=True)
class HeaderCall:
    """A call is the function's name, `between`, its arguments and what ends it; `opening` stands before a name.

    `is_numbered`: the name is followed by a colon and the number of the call, from 0."""

    opening: str
    between: str
    after_arguments: str = ""
    is_numbered: bool = False

    def before_arguments(self, name: str, index: int = 0) -> str:
        return name + (f":{index}" if self.is_numbered else "") + self.between


@dataclass(frozen=True, slots=True)
class ParameterCall:
    """A call is the function's name and its parameters between tags; `is_opened`: calls begin with the name."""

    tags: ParameterTags = QWEN3_CODER
    is_opened: bool = False

    def before_arguments(self, name: str, index: int = 0) -> str:
        return ("" if self.is_opened else self.tags.function) + name + self.tags.function_name_end

    @property
    def after_arguments(self) -> str:
        return "" if self.is_opened else self.tags.function_end


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's way to write calls."""

    begin: str  # where calls begin; empty: with the answer, whose first character tells
    prefix: str = ""
    separator: str = ""
    suffix: str = ""
    call: ObjectCall | HeaderCall | ParameterCall = ObjectCall()
    hints: tuple[str, ...] = ()  # any of these in a chat template means that the model writes so
    optional_begin: str = ""  # a control token that may stand before calls without `begin`
    prompt: str | None = None  # tells tools to models whose template cannot; None: there is no way
    has_short_ids: bool = False  # templates want ids of nine letters and digits
    is_harmony: bool = False  # answers are messages in channels: `gateway.harmony` reads and holds them

    def text_of(self, calls: Sequence[tuple[str, str]]) -> str:
        written = [
            self.call.before_arguments(name, index) + self._arguments_text(arguments) + self.call.after_arguments
            for index, (name, arguments) in enumerate(calls)
        ]
        return self.begin + self.prefix + self.separator.join(written) + self.suffix

    def _arguments_text(self, arguments: str) -> str:
        if not isinstance(self.call, ParameterCall):
            return arguments
        return parameters_text(json.loads(arguments), self.call.tags)

    def texts(self) -> str:
        between = self.call.between if isinstance(self.call, HeaderCall) else ""
        if isinstance(self.call, ParameterCall):
            between = self.call.tags.parameter + self.call.tags.parameter_name_end + self.call.tags.value_end
        return self.begin + self.prefix + self.separator + self.suffix + between + self.optional_begin

    @property
    def first_character(self) -> str:
        return (self.prefix or "{")[0]


# DeepSeek's control tokens have a full-width bar and a block for the underscore.
_DEEPSEEK = {
    name: f"<\uff5ctool\u2581{name.replace('_', chr(0x2581))}\uff5c>"
    for name in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")
}
_DEEPSEEK_V3 = _DEEPSEEK["call_begin"] + "function" + _DEEPSEEK["sep"]
_KIMI = {
    name: f"<|{name}|>"
    for name in ("tool_calls_section_begin", "tool_calls_section_end", "tool_call_end", "tool_call_argument_begin")
}
_KIMI_CALL = "<|tool_call_begin|>functions."  # before a function's name
_HARMONY = "<|start|>assistant to=functions."  # before a function's name
# The first whose hint a template has is its own, so the narrower come first.
FORMATS = {
    "smollm2": ToolFormat(
        "<tool_call>", prefix="[", separator=", ", suffix="]</tool_call>", hints=("named SmolLM,",), prompt=LIST_PROMPT
    ),
    "qwen3_coder": ToolFormat(
        "<tool_call>",
        prefix="\n",
        separator="\n</tool_call>\n<tool_call>\n",
        suffix="\n</tool_call>",
        call=ParameterCall(),
        hints=(QWEN3_CODER.parameter,),
    ),
    "glm45": ToolFormat(
        GLM45.function,
        separator=GLM45.function_end + "\n" + GLM45.function,
        suffix=GLM45.function_end,
        call=ParameterCall(GLM45, is_opened=True),
        hints=(GLM45.parameter,),
    ),
    "functionary": ToolFormat(
        "<function=",
        separator="</function>\n<function=",
        suffix="</function>",
        call=HeaderCall("<function=", ">"),
        hints=("<function=",),
    ),
    "deepseek_v3": ToolFormat(
        _DEEPSEEK["calls_begin"],
        prefix=_DEEPSEEK_V3,
        separator=_DEEPSEEK["call_end"] + "\n" + _DEEPSEEK_V3,
        suffix=_DEEPSEEK["call_end"] + _DEEPSEEK["calls_end"],
        call=HeaderCall(_DEEPSEEK_V3, "\n```json\n", "\n```"),
        hints=(f"tool['type'] + '{_DEEPSEEK['sep']}", f"function{_DEEPSEEK['sep']}"),
    ),
    "deepseek_v31": ToolFormat(
        _DEEPSEEK["calls_begin"],
        prefix=_DEEPSEEK["call_begin"],
        separator=_DEEPSEEK["call_end"] + _DEEPSEEK["call_begin"],
        suffix=_DEEPSEEK["call_end"] + _DEEPSEEK["calls_end"],
        call=HeaderCall(_DEEPSEEK["call_begin"], _DEEPSEEK["sep"]),
        hints=(_DEEPSEEK["calls_begin"],),
    ),
    "kimi_k2": ToolFormat(
        _KIMI["tool_calls_section_begin"],
        prefix=_KIMI_CALL,
        separator=_KIMI["tool_call_end"] + _KIMI_CALL,
        suffix=_KIMI["tool_call_end"] + _KIMI["tool_calls_section_end"],
        call=HeaderCall(_KIMI_CALL, _KIMI["tool_call_argument_begin"], is_numbered=True),
        hints=(_KIMI["tool_calls_section_begin"],),
    ),
    "mistral_args": ToolFormat(
        "[TOOL_CALLS]",
        separator="[TOOL_CALLS]",
        call=HeaderCall("[TOOL_CALLS]", "[ARGS]"),
        hints=("[ARGS]",),
        has_short_ids=True,
    ),
    "mistral": ToolFormat(
        "[TOOL_CALLS]", prefix="[", separator=", ", suffix="]", hints=("[TOOL_CALLS]",), has_short_ids=True
    ),
    "hermes": ToolFormat(
        "<tool_call>",
        prefix="\n",
        separator="\n</tool_call>\n<tool_call>\n",
        suffix="\n</tool_call>",
        hints=("<tool_call>",),
        prompt=CALLS_PROMPT,
    ),
    "llama3_json": ToolFormat(
        "",
        separator="; ",
        call=ObjectCall("parameters"),
        hints=("<|python_tag|>", '"parameters": dictionary of argument name'),
        optional_begin="<|python_tag|>",
    ),
    "phi4_mini": ToolFormat(
        "<|tool_call|>", separator="<|/tool_call|><|tool_call|>", suffix="<|/tool_call|>", hints=("<|/tool_call|>",)
    ),
    "granite": ToolFormat("<|tool_call|>", prefix="[", separator=", ", suffix="]", hints=("<|tool_call|>",)),
    "gpt_oss": ToolFormat(
        _HARMONY,
        separator="<|call|>" + _HARMONY,
        suffix="<|call|>",
        call=HeaderCall(_HARMONY, "<|channel|>commentary json<|message|>"),
        hints=("<|channel|>commentary",),
        is_harmony=True,
    ),
    "json": ToolFormat("", prefix="[", separator=", ", suffix="]"),
}
GENERIC = FORMATS["hermes"]  # for models whose own way is not known, and whose template shows no tools: they are told
assert tuple(FORMATS) == TOOL_FORMATS, "the configuration knows other names"


def find_tool_format(name: str | None, template: str) -> ToolFormat | None:
    """Return the configured format, or that of the chat template; None: it is not known."""
    if name is not None:
        return FORMATS[name]
    return next((form for form in FORMATS.values() if any(hint in template for hint in form.hints)), None)


Message = Mapping[str, Any]


def prompted_messages(messages: Sequence[Message], tools: Sequence[Message], form: ToolFormat) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    for message in messages:
        shown = _plain_message(message, form)
        if message["role"] == "tool" and plain and plain[-1]["is_result"]:
            plain[-1]["content"] += "\n" + shown["content"]  # templates want users and assistants in turn
        else:
            plain.append({**shown, "is_result": message["role"] == "tool"})
    prompted = [{name: value for name, value in message.items() if name != "is_result"} for message in plain]
    return _with_system_text(prompted, _system_text(tools, form)) if tools else prompted


def _plain_message(message: Message, form: ToolFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return dict(message)
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [(function["name"], json.dumps(function["arguments"], ensure_ascii=False)) for function in functions]
    return {"role": message["role"], "content": message["content"] + form.text_of(calls)}


def _system_text(tools: Sequence[Message], form: ToolFormat) -> str:
    assert form.prompt is not None, "a format without a prompt"
    return form.prompt.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))


def _with_system_text(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]


MAX_CALLS = 128
Literal = Callable[[str], str]  # a text as a sequence of literals and special tokens


_NO_TEXTS: TextParameters = {}
_SHARED = ("$defs", "definitions", "x-guidance")  # what the schemas of all parameters need of their function's


class CallableTool(NamedTuple):
    """A function that may be called, and the normalized schema of its arguments."""

    name: str
    arguments: dict[str, Any]
    texts: TextParameters = _NO_TEXTS  # parameters that a ParameterCall writes as they are


def call_rules(form: ToolFormat, tools: Sequence[CallableTool], literal: Literal, *, is_parallel: bool) -> str:
    """Return the rules of `calls`, from after `begin` to the end of the answer: nothing but calls may follow. Calls
    have exactly the white space of the families' templates; arguments match the schema of their function."""
    more = f"({literal(form.separator)} call){{0,{MAX_CALLS - 1}}}" if is_parallel else ""
    rules = [f"calls: {literal(form.prefix)} call {more} {literal(form.suffix)}"]
    options = []
    for index, tool in enumerate(tools):
        options.append(f"{_before(form, tool.name, literal)} arguments_{index} {literal(form.call.after_arguments)}")
        rules += _arguments_rules(form, tool, index, literal)
    if isinstance(form.call, HeaderCall) and form.call.is_numbered:
        rules.append("CALL_NUMBER: /[0-9]{1,3}/")
    return "\n".join([*rules, f"call: {' | '.join(options)}"])


def _before(form: ToolFormat, name: str, literal: Literal) -> str:
    if isinstance(form.call, HeaderCall) and form.call.is_numbered:
        return f"{quoted(name + ':')} CALL_NUMBER {literal(form.call.between)}"
    return literal(form.call.before_arguments(name))


def _arguments_rules(form: ToolFormat, tool: CallableTool, index: int, literal: Literal) -> list[str]:
    if not isinstance(form.call, ParameterCall):
        return [f"arguments_{index}: {json_value(tool.arguments)}"]
    tags, required = form.call.tags, tool.arguments.get("required", ())
    end = literal(tags.value_end)
    is_token = end.startswith("<[")  # a mark written as text ends the text before it
    names, rules = [], [f"text_{index}{'' if is_token else '[lazy]'}: TEXT {end}"]
    for number, (name, schema) in enumerate(tool.arguments.get("properties", {}).items()):
        if schema is False:  # it may not be given
            continue
        value = f"({_value(tool, name, schema)}) {end}" if tool.texts.get(name, ()) is not None else f"text_{index}"
        before = f"{literal(tags.parameter)} {quoted(name)} {literal(tags.parameter_name_end)}"
        rules.append(f"parameter_{index}_{number}: {before} {value}")
        names.append(f"parameter_{index}_{number}" + ("" if name in required else "?"))
    return [*rules, f"arguments_{index}: {' '.join(names) or quoted('')}"]


def _value(tool: CallableTool, name: str, schema: Any) -> str:
    texts = tool.texts.get(name)
    if texts:
        return " | ".join(quoted(text) for text in texts)
    shared = {key: value for key, value in tool.arguments.items() if key in _SHARED}
    return json_value({**({} if schema is True else schema), **shared})


def lead_rules(form: ToolFormat, literal: Literal) -> str:
    """Return the rules of `free`, content without calls, and `lead`, content and the text that begins calls."""
    if not form.begin:
        marker = literal(form.optional_begin)
        lead = f"lead: {marker}?" if marker.startswith("<[") else 'lead: ""'
        return f"free: BARE\nBARE: /([^{form.first_character}\\s](?s:.*))?/\n{lead}"
    marker = literal(form.begin)
    is_token = marker.startswith("<[")  # a mark written as text ends the text before it
    return f"free: TEXT\nlead{'' if is_token else '[lazy]'}: TEXT {marker}"
