"""Which grammars are plain: small JSON schemas that compile in milliseconds whatever they say."""

from collections.abc import Callable
from typing import Any

import orjson

from alignedserve.runtime.grammar.json_schema import FLEXIBLE_WHITESPACE

_MAX_BYTES = 8192
_MAX_DEPTH = 16
_MAX_COUNT = 32  # of items or characters, where a schema bounds them
_GUIDANCE = "x-guidance"


def is_plain(grammar: str) -> bool:
    """Return whether a grammar is such a schema: no expressions, references, intersections or large counts."""
    if len(grammar) > _MAX_BYTES:
        return False
    try:
        read = orjson.loads(grammar)
    except orjson.JSONDecodeError:
        return False
    parts = read.get("grammars") if isinstance(read, dict) else None
    if not isinstance(parts, list) or len(parts) != 1 or not isinstance(parts[0], dict):
        return False
    given = {name for name, value in parts[0].items() if value is not None} - {"name"}
    return given == {"json_schema"} and _is_plain(parts[0]["json_schema"], 0)


def _is_plain(schema: Any, depth: int) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return False
    return all(name in _KEYWORDS and _KEYWORDS[name](value, depth + 1) for name, value in schema.items())


def _anything(value: Any, depth: int) -> bool:
    return True


def _each(value: Any, depth: int) -> bool:
    return isinstance(value, list) and all(_is_plain(one, depth) for one in value)


def _named(value: Any, depth: int) -> bool:
    return isinstance(value, dict) and all(_is_plain(one, depth) for one in value.values())


def _small(value: Any, depth: int) -> bool:
    return isinstance(value, int) and value <= _MAX_COUNT


def _own_guidance(value: Any, depth: int) -> bool:
    """Return whether these are the default options of schemas, so that no client has chosen its whitespace."""
    return isinstance(value, dict) and value.get("whitespace_pattern", FLEXIBLE_WHITESPACE) == FLEXIBLE_WHITESPACE


_KEYWORDS: dict[str, Callable[[Any, int], bool]] = {
    **dict.fromkeys(("$schema", "const", "default", "description", "enum", "required", "title", "type"), _anything),
    **dict.fromkeys(("maxItems", "maxLength", "minItems", "minLength"), _small),
    "additionalProperties": _is_plain,
    "anyOf": _each,
    "items": _is_plain,
    "prefixItems": _each,
    "properties": _named,
    _GUIDANCE: _own_guidance,
}
