"""The keywords of JSON schemas that answers are held to, and how the value of each is read.

A keyword that is not in READERS, NEUTRAL or ANNOTATIONS is refused by name. So is a value that llguidance would follow
only in part: numbers beyond exact floats, texts with control characters, classes in patterns that it reads otherwise.
"""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from alignedserve.core.errors import InvalidRequest

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_MONTH_DAY = f"(?:{_LONG_MONTH}|{_SHORT_MONTH}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,30}"  # at most 61 characters
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_LOCAL = rf"{_ATOM}{{1,32}}(?:\.{_ATOM}{{1,14}}){{0,2}}"

# None: llguidance's own. The others are anchored here, and stand where llguidance's let texts through that are no such
# thing: 29 February of any year, labels of more than 63 characters, the year 0. Texts that they leave out (leap
# seconds, quoted local parts) are valid, but rare.
FORMATS: dict[str, str | None] = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": None,
    "email": f"{_LOCAL}@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": None,
    "time": _TIME,
    "uri": None,
    "uuid": None,
}
Path = tuple[str, ...]  # keywords, names and numbers that lead to a schema, as in a JSON pointer

MAX_ENUM_VALUES = 1000
MAX_PATTERN_LEN = 4096
MAX_NAME_PATTERNS = 32  # of one object: each is compared with each
MAX_COUNT = 100_000  # of characters, items or properties: state is kept of each
MAX_TEXT_LEN = 100_000_000  # of `maxLength`, of which none is kept; agents' tools have large ones
_MAX_EXACT = 1 << 53  # the numbers beyond are not all floats
_MIN_FRACTION = 1e-9
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")  # those that answers never hold
_CLASS = re.compile(r"\\.|\[((?:\\.|[^\]\\])*)\]?", re.DOTALL)
_NOT_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9k]")
MAX_EXPANDED_LEN = 100_000  # of a pattern whose counted repetitions are written out
_PIECES = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\d{1,9}(?:,\d{0,9})?\}|.", re.DOTALL)
_DIALECTS = re.compile(r"https?://json-schema\.org/(?:draft/20(?:19-09|20-12)|draft-0[67])/schema#?")

ANNOTATIONS = frozenset(
    {
        "$anchor", "$comment", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated",
        "description", "discriminator", "example", "examples", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip
# Values that hold for everything.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "propertyNames": ({"type": "string"}, {}, True),  # the first is what zod writes for a record
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "uniqueItems": (False,),
}


class SchemaReader(Protocol):
    """Reads the schemas within a schema."""

    def schema(self, schema: Any, path: Path) -> Any:
        """Return the schema at this path, checked and rewritten."""

    def local_pointer(self, pointer: str) -> str | None:
        """Return a reference as a pointer into the document; None: it leads elsewhere."""

    def property_names(self, names: list[str]) -> None:
        """Count properties."""


def unsupported_keyword(keyword: str, why: str = "is not supported") -> InvalidRequest:
    shown = f"'{keyword}'" if re.fullmatch(r"[$\w.-]{1,64}", keyword, re.ASCII) else "(not an identifier)"
    return InvalidRequest(f"the JSON Schema keyword {shown} {why}", code="invalid_json_schema")


def _expect(holds: bool, keyword: str, why: str) -> None:
    if not holds:
        raise unsupported_keyword(keyword, why)


def _schema(reader: SchemaReader, keyword: str, value: Any, path: Path) -> Any:
    return reader.schema(value, (*path, keyword))


def _schemas(reader: SchemaReader, keyword: str, value: Any, path: Path) -> list[Any]:
    _expect(isinstance(value, list) and len(value) > 0, keyword, "must be a list of schemas, not empty")
    return [reader.schema(item, (*path, keyword, str(index))) for index, item in enumerate(value)]


def _items(reader: SchemaReader, keyword: str, value: Any, path: Path) -> Any:
    # Drafts before 2020-12 write `prefixItems` so.
    read = _schemas if isinstance(value, list) else _schema
    return read(reader, keyword, value, path)


def _named_schemas(reader: SchemaReader, keyword: str, value: Any, path: Path) -> dict[str, Any]:
    _expect(isinstance(value, dict), keyword, "must be an object of schemas")
    return {name: reader.schema(schema, (*path, keyword, name)) for name, schema in value.items()}


def _properties(reader: SchemaReader, keyword: str, value: Any, path: Path) -> dict[str, Any]:
    named = _named_schemas(reader, keyword, value, path)
    reader.property_names(list(named))
    for name in named:
        _check_text(keyword, name)
    return named


def _patterns(reader: SchemaReader, keyword: str, value: Any, path: Path) -> dict[str, Any]:
    named = _named_schemas(reader, keyword, value, path)
    _expect(len(named) <= MAX_NAME_PATTERNS, keyword, f"has more than {MAX_NAME_PATTERNS} patterns")
    for pattern in named:
        _pattern(reader, keyword, pattern, path)
    return named


def _reference(reader: SchemaReader, keyword: str, value: Any, path: Path) -> str:
    pointer = reader.local_pointer(value) if isinstance(value, str) else None
    _expect(pointer is not None, keyword, "must point into the same schema ('#/$defs/...'): nothing is fetched")
    assert pointer is not None
    return pointer


def _type(reader: SchemaReader, keyword: str, value: Any, path: Path) -> Any:
    types = value if isinstance(value, list) else [value]
    known = len(types) > 0 and all(isinstance(name, str) and name in _TYPES for name in types)
    _expect(known, keyword, "must be one of JSON's types, or a list of them")
    return value


def _const(reader: SchemaReader, keyword: str, value: Any, path: Path) -> Any:
    for scalar in _scalars(value):
        if isinstance(scalar, str):
            _check_text(keyword, scalar)
        elif isinstance(scalar, int | float):
            _check_number(keyword, scalar)
    return value


def _enum(reader: SchemaReader, keyword: str, value: Any, path: Path) -> Any:
    _expect(isinstance(value, list) and len(value) > 0, keyword, "must be a list, not empty")
    _expect(len(value) <= MAX_ENUM_VALUES, keyword, f"has more than {MAX_ENUM_VALUES} values")
    return [_const(reader, keyword, item, path) for item in value]


def _number(reader: SchemaReader, keyword: str, value: Any, path: Path) -> Any:
    _expect(isinstance(value, int | float) and not isinstance(value, bool), keyword, "must be a number")
    _check_number(keyword, value)
    _expect(keyword != "multipleOf" or value > 0, keyword, "must be above 0")
    return value


def _count(reader: SchemaReader, keyword: str, value: Any, path: Path) -> int:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    limit = MAX_TEXT_LEN if keyword == "maxLength" else MAX_COUNT
    _expect(is_whole and 0 <= value <= limit, keyword, f"must be a whole number from 0 to {limit}")
    return int(value)


def _names(reader: SchemaReader, keyword: str, value: Any, path: Path) -> Any:
    _expect(
        isinstance(value, list) and all(isinstance(name, str) for name in value), keyword, "must be a list of names"
    )
    for name in value:
        _check_text(keyword, name)
    return value


def _pattern(reader: SchemaReader, keyword: str, value: Any, path: Path) -> str:
    _expect(isinstance(value, str) and len(value) <= MAX_PATTERN_LEN, keyword, "is not a pattern, or too long a one")
    _expect(_NOT_REGULAR.search(_CLASS.sub(_outside, value)) is None, keyword, "has look-around or back-references")
    _expect(
        is_short_expanded(value), keyword, f"has more than {MAX_EXPANDED_LEN} characters with repetitions written out"
    )
    _expect(not _has_class_operation(value), keyword, "must escape '[', '&&', '--', '~~' and a first ']' in a class")
    assert isinstance(value, str)
    return value


def is_short_expanded(pattern: str) -> bool:
    """Return whether a pattern stays short with counted repetitions written out: `(a{100}){100}` has 10 000 characters.
    Memory of what it becomes grows with that."""
    groups, last = [0], 0
    for piece in _PIECES.findall(pattern):
        if piece == "(":
            groups.append(0)
        elif piece == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif piece[0] == "{" and len(piece) > 1:
            count = max(1, *(int(number) for number in re.findall(r"\d+", piece)))
            groups[-1] += last * (count - 1)
            last *= count
        elif piece not in "?*+|":
            last = 1
            groups[-1] += 1
        if max(last, groups[-1]) > MAX_EXPANDED_LEN:
            return False
    return sum(groups) <= MAX_EXPANDED_LEN


def _outside(match: re.Match[str]) -> str:
    return match[0] if match[1] is None else ""


def _has_class_operation(pattern: str) -> bool:
    bodies = [match[1] for match in _CLASS.finditer(pattern) if match[1] is not None]
    plain = (re.sub(r"\\.", "", body, flags=re.DOTALL) for body in bodies)
    return "" in bodies or "^" in bodies or any(re.search(r"\[|&&|--|~~", body) for body in plain)


def _format(reader: SchemaReader, keyword: str, value: Any, path: Path) -> str:
    known = isinstance(value, str) and value in FORMATS
    _expect(known, keyword, f"must be one of {', '.join(sorted(FORMATS))}")
    assert isinstance(value, str)
    return value


def check_dialect(value: Any) -> None:
    known = isinstance(value, str) and _DIALECTS.fullmatch(value) is not None
    _expect(known, "$schema", "must name draft 2020-12, 2019-09, 07 or 06")


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _scalars(item)
    else:
        yield value


def _check_text(keyword: str, text: str) -> None:
    _expect(_CONTROL.search(text) is None, keyword, "holds a control character")


def _check_number(keyword: str, number: float) -> None:
    size = abs(number)
    exact = math.isfinite(number) and (number == 0 or _MIN_FRACTION <= size <= _MAX_EXACT)
    _expect(exact, keyword, "holds a number that is too large or too small to be exact")


Reader = Callable[[SchemaReader, str, Any, Path], Any]

READERS: dict[str, Reader] = {
    "$defs": _named_schemas,
    "$ref": _reference,
    "additionalItems": _schema,
    "additionalProperties": _schema,
    "allOf": _schemas,
    "anyOf": _schemas,
    "const": _const,
    "definitions": _named_schemas,
    "enum": _enum,
    "exclusiveMaximum": _number,
    "exclusiveMinimum": _number,
    "format": _format,
    "items": _items,
    "maxItems": _count,
    "maxLength": _count,
    "maxProperties": _count,
    "maximum": _number,
    "minItems": _count,
    "minLength": _count,
    "minProperties": _count,
    "minimum": _number,
    "multipleOf": _number,
    "oneOf": _schemas,
    "pattern": _pattern,
    "patternProperties": _patterns,
    "prefixItems": _schemas,
    "properties": _properties,
    "required": _names,
    "type": _type,
}


def pattern_of(name: str) -> str | None:
    pattern = FORMATS[name]
    return None if pattern is None else f"^(?:{pattern})$"
