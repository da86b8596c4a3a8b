"""Says what is wrong with a configuration: the field's name, what it must be, and what may have been meant."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_args

import msgspec

from alignedserve.config.sections import ClusterConfig, Topology
from alignedserve.core.errors import ConfigError
from alignedserve.disk.plain_yaml import required_kind

_SECTIONS = {
    one.name: one.type for one in msgspec.structs.fields(ClusterConfig) if hasattr(one.type, "__struct_fields__")
}

_PLACE = re.compile(r"(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<place>[^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_MAX_SHOWN = 60  # characters of a value
_MAX_ELSEWHERE = 3  # sections that are named where a field is not


def refusal_of(error: msgspec.ValidationError, values: Mapping[str, Any]) -> str:
    if isinstance(error.__cause__, ConfigError):  # of a section's own check, which names the field
        return str(error.__cause__)
    match = _PLACE.fullmatch(str(error))
    assert match is not None, "the pattern matches every text"
    problem, place = match["problem"], match["place"] or ""
    before = f"{place}: " if place else ""
    if unknown := _UNKNOWN.fullmatch(problem):
        return f"{before}unknown field `{unknown['name']}`{_hint(unknown['name'], place)}"
    if missing := _MISSING.fullmatch(problem):
        return f"{before}the field `{missing['name']}` is missing"
    if match["key"] is not None:
        return f"{before}a name is not a text; quote words that mean something in YAML, such as on and yes"
    if place == "topology":
        return f"topology must be one of {', '.join(one.value for one in Topology)} (it is {_shown(values, place)})"
    if place in _SECTIONS and values.get(place) is None:  # as where every line below it is a comment
        return f"{place} is there without a field; leave it out as well"
    if place and (required := required_kind(problem)):
        return f"{place} {required} (it is {_shown(values, place)})"
    return f"{before}{problem}"


def _hint(name: str, place: str) -> str:
    meant = [f"`{section}.{name}`" for section, kind in _SECTIONS.items() if name in _names(kind)]
    if not 0 < len(meant) <= _MAX_ELSEWHERE:
        meant = [f"`{close_match}`" for close_match in get_close_matches(name, _fields_at(place), n=1)]
    return f"; did you mean {' or '.join(meant)}?" if meant else "; docs/settings.md has all"


def _fields_at(place: str) -> tuple[str, ...]:
    kind: Any = ClusterConfig
    for name in re.findall(r"[^.\[\]]+", re.sub(r"\[[^]]*\]", "", place)):
        of_field = next((field.type for field in msgspec.structs.fields(kind) if field.name == name), None)
        kind = next((arg for arg in (of_field, *get_args(of_field)) if hasattr(arg, "__struct_fields__")), None)
        if kind is None:
            return ()
    return _names(kind)


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind))


def _shown(values: Mapping[str, Any], place: str) -> str:
    value: Any = values
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", place):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError):
            return "another"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
