"""Proves that no value matches two options of a `oneOf`, so that any of them may be allowed.

llguidance proves the same, but does not follow references, and options written by pydantic are references.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import orjson

_MAX_OPTIONS = 200


def are_exclusive(options: Sequence[Any], targets: Mapping[str, Any]) -> bool:
    """Return whether no value can match two of the options. `targets`: the schemas that references point to."""
    if len(options) > _MAX_OPTIONS:
        return False
    conjuncts = [list(_conjuncts(option, targets, set())) for option in options]
    return all(_exclude(left, right, targets) for left, right in combinations(conjuncts, 2))


def _conjuncts(schema: Any, targets: Mapping[str, Any], seen: set[str]) -> Iterator[dict[str, Any]]:
    if not isinstance(schema, dict):
        return
    yield schema
    pointer = schema.get("$ref")
    if pointer is not None and pointer not in seen:
        seen.add(pointer)
        yield from _conjuncts(targets[pointer], targets, seen)
    for part in schema.get("allOf", ()):
        yield from _conjuncts(part, targets, seen)


def _exclude(left: list[dict[str, Any]], right: list[dict[str, Any]], targets: Mapping[str, Any]) -> bool:
    left_types, right_types = _types(left), _types(right)
    if left_types is not None and right_types is not None and not left_types & right_types:
        return True
    left_values, right_values = _values(left), _values(right)
    if left_values is not None and right_values is not None and not left_values & right_values:
        return True
    if frozenset({"object"}) not in (left_types, right_types):
        return False  # a value that is no object has no properties to tell the options apart
    required = {name for schema in (*left, *right) for name in schema.get("required", ())}
    return any(_property_excludes(name, left, right, targets) for name in sorted(required))


def _property_excludes(
    name: str, left: list[dict[str, Any]], right: list[dict[str, Any]], targets: Mapping[str, Any]
) -> bool:
    left_values, right_values = _property_values(name, left, targets), _property_values(name, right, targets)
    return left_values is not None and right_values is not None and not left_values & right_values


def _property_values(name: str, schemas: list[dict[str, Any]], targets: Mapping[str, Any]) -> frozenset[bytes] | None:
    for schema in schemas:
        values = _values(list(_conjuncts(schema.get("properties", {}).get(name), targets, set())))
        if values is not None:
            return values
    return None


def _types(schemas: list[dict[str, Any]]) -> frozenset[str] | None:
    for schema in schemas:
        if "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            return frozenset("number" if name == "integer" else name for name in names)
    return None


def _values(schemas: list[dict[str, Any]]) -> frozenset[bytes] | None:
    for schema in schemas:
        if "const" in schema:
            return frozenset({_key(schema["const"])})
        if "enum" in schema:
            return frozenset(_key(value) for value in schema["enum"])
    return None


def _key(value: Any) -> bytes:
    return orjson.dumps(_with_floats(value), option=orjson.OPT_SORT_KEYS)


def _with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_floats(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return float(value) + 0.0 if isinstance(value, int | float) and not isinstance(value, bool) else value
