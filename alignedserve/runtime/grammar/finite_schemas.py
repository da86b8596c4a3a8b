"""Finds schemas that no finite value matches, such as an object that requires itself: an answer would never end."""

from collections.abc import Mapping
from typing import Any

_SCALARS = frozenset({"null", "boolean", "integer", "number", "string"})
_ANY_TYPE = ("null", "array", "object")


def has_finite_instance(root: Any, targets: Mapping[str, Any]) -> bool:
    """Return whether some finite value may match the schema, and each that it refers to.

    `targets`: the schemas that references point to. One without end could be entered, and never be left.
    """
    finite: set[str] = set()
    while True:
        # References count once their target does.
        found = {pointer for pointer in targets.keys() - finite if _is_finite(targets[pointer], finite)}
        if not found:
            return len(finite) == len(targets) and _is_finite(root, finite)
        finite |= found


def _is_finite(schema: Any, finite: set[str]) -> bool:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"] not in finite:
        return False
    if not all(_is_finite(option, finite) for option in schema.get("allOf", ())):
        return False
    if not all(_has_finite_option(schema[key], finite) for key in ("anyOf", "oneOf") if key in schema):
        return False
    if "const" in schema or "enum" in schema:
        return True
    types = schema.get("type", _ANY_TYPE)
    types = (types,) if isinstance(types, str) else types
    return any(_has_finite_value(schema, kind, finite) for kind in types)


def _has_finite_option(options: list[Any], finite: set[str]) -> bool:
    return any(_is_finite(option, finite) for option in options)


def _has_finite_value(schema: dict[str, Any], kind: str, finite: set[str]) -> bool:
    if kind in _SCALARS:
        return True
    if kind == "object":
        properties, additional = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(_is_finite(properties.get(name, additional), finite) for name in schema.get("required", ()))
    num_items, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
    needed = prefix[:num_items] + ([schema.get("items", True)] if num_items > len(prefix) else [])
    return all(_is_finite(item, finite) for item in needed)
