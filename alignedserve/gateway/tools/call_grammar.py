"""Holds an answer to its tools: the rules of calls, in the language of `runtime.grammar.lark`.

Calls are written with exactly the white space that the families' templates show; their arguments match the schema of
the function. Once the text that begins calls is there, nothing but calls may follow.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from alignedserve.gateway.tools.formats import ToolFormat
from alignedserve.runtime.grammar.lark import json_value

MAX_CALLS = 128
Literal = Callable[[str], str]  # a text as a sequence of literals and special tokens


class CallableTool(NamedTuple):
    """A function that may be called, and the normalized schema of its arguments."""

    name: str
    arguments: dict[str, Any]


def call_rules(form: ToolFormat, tools: Sequence[CallableTool], literal: Literal, *, is_parallel: bool) -> str:
    """Return the rules of `calls`, which is all of them from after `begin`."""
    more = f"({literal(form.separator)} call){{0,{MAX_CALLS - 1}}}" if is_parallel else ""
    rules = [f"calls: {literal(form.prefix)} call {more} {literal(form.suffix)}"]
    options = []
    for place, tool in enumerate(tools):
        before, after = form.call.before_arguments(tool.name), form.call.after_arguments
        options.append(f"{literal(before)} arguments_{place} {literal(after)}")
        rules.append(f"arguments_{place}: {json_value(tool.arguments)}")
    return "\n".join([*rules, f"call: {' | '.join(options)}"])


def lead_rules(form: ToolFormat, literal: Literal) -> str:
    """Return the rules of `free`, content without calls, and `lead`, content and the text that begins calls."""
    if not form.begin:
        marker = literal(form.optional_begin)
        lead = f"lead: {marker}?" if marker.startswith("<[") else 'lead: ""'
        return f"free: BARE\nBARE: /([^{form.first_character}\\s](?s:.*))?/\n{lead}"
    marker = literal(form.begin)
    is_token = marker.startswith("<[")  # what is written as text ends the text that it follows
    return f"free: TEXT\nlead{'' if is_token else '[lazy]'}: TEXT {marker}"
