"""Checks JSON schemas and rewrites them for llguidance: every answer under the result is valid.

1. The size is bounded, then every schema within is read, keyword by keyword (schema_keywords.py); annotations go.
2. What older drafts write otherwise is written as draft 2020-12 does; formats become patterns, integers have bounds.
3. References must point to a schema that was read, and something finite must match.
4. `oneOf` becomes `anyOf` where its options exclude each other; llguidance refuses the rest."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from itertools import combinations
from math import lcm, perm
from typing import Any
from urllib.parse import unquote

import orjson

from alignedserve.core.errors import InvalidRequest
from alignedserve.runtime.grammar.schema_keywords import (
    ANNOTATIONS,
    NEUTRAL,
    READERS,
    Path,
    check_dialect,
    pattern_of,
    unsupported_keyword,
)

_MAX_OPTIONS = 200


def are_exclusive(options: Sequence[Any], targets: Mapping[str, Any]) -> bool:
    """Return whether no value can match two of the options. `targets`: the schemas that references point to. llguidance
    proves the same, but follows no references, and pydantic writes options as references."""
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


_SCALARS = frozenset({"null", "boolean", "integer", "number", "string"})
_ANY_TYPE = ("null", "array", "object")
MAX_SCHEMA_BYTES = 256 * 1024
MAX_PROPERTIES = 2000
MAX_OPTIONAL_PROPERTIES = 300  # of one object: any of them may come next, and the parser keeps them all in mind
MAX_PATTERNS_AT_ONCE = 8
MAX_DIVISOR = 10_000
_MAX_PATH_LEN = 64
_MAX_INTEGER = (1 << 53) - 1
_BOUNDS = (("minimum", "exclusiveMinimum", 1, ROUND_CEILING), ("maximum", "exclusiveMaximum", -1, ROUND_FLOOR))
_MAX_BOUND_DIGITS = 14  # of one with a fraction
_STEP = Decimal("1e-9")
_MAX_NAMES_LEN = 2000  # of the properties of one object
_MAX_ORDERS = 24  # of the properties of an object: the parser follows all that may still come
_MAX_ORDERED_BYTES = 8192  # of a schema with orders of its objects written out
_SHORT_POINTER = re.compile(r"#(?:/(?:\$defs|definitions)/[^/]*)?")
_DEFINITIONS = ("$defs", "definitions")
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties", "patternProperties"})
_NOTHING = ""
_ESCAPED = r'"\\\x00-\x1f\x7f'  # characters that names have only behind a backslash, or never

# Bounded: a model cannot go on with white space for ever. A space, or a new line with its indentation.
FLEXIBLE_WHITESPACE = r" |\n[ \t]{0,32}"


def normalize_schema(
    schema: Any,
    *,
    whitespace_pattern: str | None = FLEXIBLE_WHITESPACE,
    left_out: set[str] | None = None,
    without: Collection[str] = (),
    has_one_order: bool = False,
) -> dict[str, Any]:
    """Return the schema for `%json` or `json_schema` of llguidance, with options that keep answers valid and finite.

    `whitespace_pattern`: a regular expression of what may stand between two tokens of JSON; None: nothing.
    `left_out`: the schema is a hint, and keywords that cannot be followed are added here; None: it is refused then.
    `without`: keywords to leave out of a hint. `has_one_order`: properties come in the order of the schema.
    Raises InvalidRequest naming the keyword, without a `param`."""
    _check_size(schema)
    reader = _Reader(left_out, without)
    read = reader.schema(schema, ())
    reader.check_conjunctions()
    targets = reader.targets(read)
    if not has_finite_instance(read, targets):
        raise InvalidRequest("no finite JSON value matches the schema, or a part of it", code="invalid_json_schema")
    for holder in reader.one_ofs:
        is_exclusive = are_exclusive(holder["oneOf"], targets)
        if is_exclusive or left_out is not None:
            _with_any_of(holder)
        if not is_exclusive and left_out is not None:
            left_out.add("oneOf")
    if not reader.has_conjunction:  # else names are those of several schemas
        for holder in reader.objects:
            _limit_other_names(holder)
        is_short = len(orjson.dumps(read)) <= _MAX_ORDERED_BYTES and all(map(_SHORT_POINTER.fullmatch, targets))
        if is_short and not has_one_order:
            for holder in reversed(reader.objects):
                _allow_orders(holder, read)
    return {**({} if read is True else read), "x-guidance": _options(whitespace_pattern)}


class _Reader:
    def __init__(self, left_out: set[str] | None, without: Collection[str]) -> None:
        self._left_out, self._without = left_out, without
        self._address = ""  # of the whole schema, by which references may call it
        self._paths: set[Path] = set()
        self._references: dict[str, list[dict[str, Any]]] = {}  # by pointer: the schemas that have it
        self._num_properties = 0
        self._num_patterns = 0
        self.has_conjunction = False
        self.objects: list[dict[str, Any]] = []  # schemas with properties
        self._divisor = 1  # that all of `multipleOf` divide
        self.one_ofs: list[dict[str, Any]] = []

    def schema(self, schema: Any, path: Path) -> Any:
        self._paths.add(path)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise InvalidRequest("a JSON schema must be an object or a boolean", code="invalid_json_schema")
        if len(path) > _MAX_PATH_LEN:
            raise InvalidRequest("the JSON schema is nested too deep", code="invalid_json_schema")
        if not path and isinstance(schema.get("$id"), str):
            self._address = schema["$id"].removesuffix("#")
        read: dict[str, Any] = {}
        for keyword, value in (schema if self._left_out is None else _with_null(schema)).items():
            with self._leaving_out(keyword):
                if not self._is_without_effect(keyword, value, path):
                    if keyword not in READERS or keyword in self._without:
                        raise unsupported_keyword(keyword)
                    read[keyword] = READERS[keyword](self, keyword, value, path)
        self._check_property_counts(read)
        self._num_patterns += ("pattern" in read) + ("format" in read)
        names = read.keys() - {"$defs", "definitions"}
        self.has_conjunction |= "allOf" in names or (len(names) > 1 and bool(names & {"$ref", "anyOf", "oneOf"}))
        if "multipleOf" in read:
            self._divisor = lcm(self._divisor, Decimal(str(read["multipleOf"])).as_integer_ratio()[0])
        if "oneOf" in read:
            self.one_ofs.append(read)
        if "properties" in read:
            self.objects.append(read)
        if "$ref" in read:
            self._references.setdefault(read["$ref"], []).append(read)
        return _rewritten(read)

    @contextmanager
    def _leaving_out(self, keyword: str) -> Iterator[None]:
        """Leave a keyword out that is refused in the block, where the schema is a hint."""
        try:
            yield
        except InvalidRequest:
            if self._left_out is None:
                raise
            self._left_out.add(keyword)

    def _check_property_counts(self, read: dict[str, Any]) -> None:
        for keyword, check in (("properties", _check_optional), ("minProperties", _check_least_properties)):
            value = read.pop(keyword, None)
            with self._leaving_out(keyword):
                check(value, read)
                if value is not None:
                    read[keyword] = value

    def local_pointer(self, pointer: str) -> str | None:
        local = pointer.removeprefix(self._address) or "#"
        return local if local == "#" or local.startswith("#/") else None

    def property_names(self, names: list[str]) -> None:
        self._num_properties += len(names)
        if self._num_properties > MAX_PROPERTIES:
            raise unsupported_keyword("properties", f"names more than {MAX_PROPERTIES} properties in all")

    def targets(self, root: Any) -> dict[str, Any]:
        targets = {}
        for pointer in sorted(self._references):
            with self._leaving_out("$ref"):
                try:
                    targets[pointer] = self._target(root, _steps(pointer))
                except LookupError as error:
                    for holder in self._references[pointer]:
                        del holder["$ref"]
                    raise unsupported_keyword("$ref", "points to something that is not a schema here") from error
        return targets

    def _target(self, node: Any, path: Path) -> Any:
        if path not in self._paths:
            raise LookupError(path)
        for step in path:
            node = node[int(step)] if isinstance(node, list) else node[step]
        return node

    def check_conjunctions(self) -> None:
        if self.has_conjunction and self._num_patterns > MAX_PATTERNS_AT_ONCE:
            raise unsupported_keyword(
                "pattern", f"stands more than {MAX_PATTERNS_AT_ONCE} times beside 'allOf' or '$ref'"
            )
        if self._divisor > MAX_DIVISOR:
            raise unsupported_keyword("multipleOf", "has too many digits")

    @staticmethod
    def _is_without_effect(keyword: str, value: Any, path: Path) -> bool:
        if keyword == "$schema":
            check_dialect(value)
            return True
        if keyword == "$id" and not path:
            return True  # references are local to the document, whatever its address
        is_extension = keyword.startswith("x-") and keyword != "x-guidance"
        is_neutral = any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(keyword, ()))
        return keyword in ANNOTATIONS or is_extension or is_neutral


def _limit_other_names(schema: dict[str, Any]) -> None:
    """Let names that are not listed neither begin with a listed name nor hold an escape.

    Else a model that writes a listed name out of its order would be left with `name\\"` and the like.
    """
    others = schema.get("additionalProperties", True)
    if others is False or "patternProperties" in schema or "" in schema["properties"]:
        return
    names = dict.fromkeys((*schema["properties"], *schema.get("required", ())), others) | schema["properties"]
    if sum(map(len, names)) <= _MAX_NAMES_LEN:
        patterns = {pattern_of_others(names): others}
        schema |= {"properties": names, "patternProperties": patterns, "additionalProperties": False}


def pattern_of_others(names: Iterable[str]) -> str:
    return f"^{_other_names(frozenset(names))}$"


def _allow_orders(schema: dict[str, Any], root: Any) -> None:
    """Let optional properties stand anywhere among the required ones, which keep the schema's order, as OpenAI's do.
    Else a model that writes a later property first could not write the earlier one any more."""
    of_order = {keyword: value for keyword, value in schema.items() if keyword not in _DEFINITIONS}
    properties, required = schema["properties"], schema.get("required", ())
    optional = [name for name in properties if name not in required]
    is_plain = schema.get("type") == "object" and of_order.keys() <= _OF_OBJECTS and properties.keys() >= set(required)
    if not is_plain or not 1 < perm(len(properties), len(optional)) <= _MAX_ORDERS:
        return
    before, orders = schema.copy(), [[name for name in properties if name in required]]
    for name in optional:
        orders = [[*order[:index], name, *order[index:]] for order in orders for index in range(len(order) + 1)]
    for keyword in of_order:
        del schema[keyword]
    schema["anyOf"] = [of_order | {"properties": {name: properties[name] for name in order}} for order in orders]
    if len(orjson.dumps(root)) > _MAX_ORDERED_BYTES:
        schema.clear()
        schema |= before


def _other_names(names: frozenset[str]) -> str:
    """Return an expression for texts that begin with none of these."""
    if "" in names:
        return _NOTHING
    firsts = sorted({name[0] for name in names})
    rests = {first: frozenset(name[1:] for name in names if name[0] == first) for first in firsts}
    longer = (f"{re.escape(first)}{rest}" for first in firsts if (rest := _other_names(rests[first])) != _NOTHING)
    excluded = "".join(f"\\x{{{ord(first):x}}}" for first in firsts)
    return f"(?:|[^{excluded}{_ESCAPED}][^{_ESCAPED}]*{''.join(f'|{alternative}' for alternative in longer)})"


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with `nullable`, a word of OpenAPI, as part of its type."""
    types = schema.get("type")
    if schema.get("nullable") is not True or not isinstance(types, str | list):
        return schema
    others = {name: value for name, value in schema.items() if name != "nullable"}
    values = {"enum": [*schema["enum"], None]} if isinstance(schema.get("enum"), list) else {}
    return others | {"type": [*([types] if isinstance(types, str) else types), "null"]} | values


def _rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    additional_items = schema.pop("additionalItems", None)
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        if additional_items is not None:
            schema["items"] = additional_items
    _bound_integers(schema)
    _narrow_bounds(schema)
    pattern = pattern_of(schema["format"]) if "format" in schema else None
    if pattern is not None:
        del schema["format"]
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": pattern}]
        else:
            schema["pattern"] = pattern
    return schema


def _bound_integers(schema: dict[str, Any]) -> None:
    types = schema.get("type", ())
    if types != "integer" and not ("integer" in types and "number" not in types):
        return
    if not {"maximum", "exclusiveMaximum"} & schema.keys():
        schema["maximum"] = _MAX_INTEGER
    if not {"minimum", "exclusiveMinimum"} & schema.keys():
        schema["minimum"] = -_MAX_INTEGER


def _narrow_bounds(schema: dict[str, Any]) -> None:
    """Narrow bounds of numbers by next to nothing where llguidance would let others through. Those are bounds of many
    digits, and whole ones that are excluded, on the side of 0: it allows them all the same where the other bound is
    less than 1 away."""
    for inclusive, exclusive, sign, rounding in _BOUNDS:
        shortened = Context(_MAX_BOUND_DIGITS, rounding).plus
        excluded = schema.get(exclusive, 0.5)
        if excluded % 1 == 0 and excluded * sign >= 0 and schema.get("type") != "integer":
            bound = float(shortened(Decimal(schema.pop(exclusive)) + sign * _STEP))
            schema[inclusive] = sign * max(sign * schema.get(inclusive, bound), sign * bound)
        for keyword in (inclusive, exclusive):
            if keyword in schema and schema[keyword] % 1:
                schema[keyword] = float(shortened(Decimal(str(schema[keyword]))))


def _check_optional(properties: Any, schema: dict[str, Any]) -> None:
    if len(set(properties or ()).difference(schema.get("required", ()))) > MAX_OPTIONAL_PROPERTIES:
        raise unsupported_keyword("properties", f"has more than {MAX_OPTIONAL_PROPERTIES} that are not required")


def _check_least_properties(least: Any, schema: dict[str, Any]) -> None:
    # Names that are not listed may come twice, and then count once.
    if (least or 0) > max(1, len(set(schema.get("required", ())))):
        raise unsupported_keyword("minProperties", "must not exceed 1 or the number of required properties")


def _with_any_of(holder: dict[str, Any]) -> None:
    keywords = list(holder.items())
    holder.clear()
    for keyword, value in keywords:
        if keyword != "oneOf":
            holder[keyword] = value
        elif any(name == "anyOf" for name, _ in keywords):
            holder["allOf"] = [*dict(keywords).get("allOf", ()), {"anyOf": value}]
        else:
            holder["anyOf"] = value


def _check_size(schema: Any) -> None:
    try:
        size = len(orjson.dumps(schema))
    except TypeError as error:
        raise InvalidRequest("the JSON schema is not JSON", code="invalid_json_schema") from error
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"the JSON schema is larger than {MAX_SCHEMA_BYTES} bytes", code="invalid_json_schema")


def _steps(pointer: str) -> Path:
    return tuple(unquote(step).replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:])


def _options(whitespace_pattern: str | None) -> dict[str, Any]:
    # Without \u escapes every text has one form: a name in `properties` cannot come again under another.
    whitespace = (
        {"whitespace_flexible": False} if whitespace_pattern is None else {"whitespace_pattern": whitespace_pattern}
    )
    return {**whitespace, "json_allowed_escapes": 'nrbtf\\"'}


def has_finite_instance(root: Any, targets: Mapping[str, Any]) -> bool:
    """Return whether some finite value may match the schema, and each that it refers to.

    `targets`: the schemas that references point to. One without end could be entered, and never be left."""
    finite: set[str] = set()
    while True:
        # References count once their target does.
        newly_finite = {pointer for pointer in targets.keys() - finite if _is_finite(targets[pointer], finite)}
        if not newly_finite:
            return len(finite) == len(targets) and _is_finite(root, finite)
        finite |= newly_finite


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
