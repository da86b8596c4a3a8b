"""Holds an answer to its tools: the rules of calls, in the language of `runtime.grammar.lark`.

Calls are written with exactly the white space that the families' templates show; their arguments match the schema of
the function. Once the text that begins calls is there, nothing but calls may follow.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from alignedserve.api.tools.formats import HeaderCall, ParameterCall, ToolFormat
from alignedserve.api.tools.parameters import TextParameters
from alignedserve.runtime.grammar.constraints import json_value, quoted

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
    """Return the rules of `calls`, which is all of them from after `begin`."""
    more = f"({literal(form.separator)} call){{0,{MAX_CALLS - 1}}}" if is_parallel else ""
    rules = [f"calls: {literal(form.prefix)} call {more} {literal(form.suffix)}"]
    options = []
    for place, tool in enumerate(tools):
        options.append(f"{_before(form, tool.name, literal)} arguments_{place} {literal(form.call.after_arguments)}")
        rules += _arguments_rules(form, tool, place, literal)
    if isinstance(form.call, HeaderCall) and form.call.is_numbered:
        rules.append("CALL_NUMBER: /[0-9]{1,3}/")
    return "\n".join([*rules, f"call: {' | '.join(options)}"])


def _before(form: ToolFormat, name: str, literal: Literal) -> str:
    if isinstance(form.call, HeaderCall) and form.call.is_numbered:
        return f"{quoted(name + ':')} CALL_NUMBER {literal(form.call.between)}"
    return literal(form.call.before_arguments(name))


def _arguments_rules(form: ToolFormat, tool: CallableTool, place: int, literal: Literal) -> list[str]:
    if not isinstance(form.call, ParameterCall):
        return [f"arguments_{place}: {json_value(tool.arguments)}"]
    tags, required = form.call.tags, tool.arguments.get("required", ())
    end = literal(tags.value_end)
    is_token = end.startswith("<[")  # what is written as text ends the text that it follows
    names, rules = [], [f"text_{place}{'' if is_token else '[lazy]'}: TEXT {end}"]
    for number, (name, schema) in enumerate(tool.arguments.get("properties", {}).items()):
        if schema is False:  # it may not be given
            continue
        value = f"({_value(tool, name, schema)}) {end}" if tool.texts.get(name, ()) is not None else f"text_{place}"
        before = f"{literal(tags.parameter)} {quoted(name)} {literal(tags.parameter_name_end)}"
        rules.append(f"parameter_{place}_{number}: {before} {value}")
        names.append(f"parameter_{place}_{number}" + ("" if name in required else "?"))
    return [*rules, f"arguments_{place}: {' '.join(names) or quoted('')}"]


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
    is_token = marker.startswith("<[")  # what is written as text ends the text that it follows
    return f"free: TEXT\nlead{'' if is_token else '[lazy]'}: TEXT {marker}"
