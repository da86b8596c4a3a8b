"""Reading of untrusted JSON files that come with a model: every field is checked for type and bounds."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignedserve.core.errors import ModelError, ModelNotFound


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the file. Raises ModelNotFound or ModelError naming the file."""
    decoded = _read_json(path, max_bytes)
    if not isinstance(decoded, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return decoded


def read_json_list(path: Path, max_bytes: int, max_entries: int) -> list[dict[str, Any]]:
    """Return the list of JSON objects in the file. Raises ModelNotFound or ModelError naming the file."""
    decoded = _read_json(path, max_bytes)
    is_list = isinstance(decoded, list) and len(decoded) <= max_entries
    if not is_list or not all(isinstance(entry, dict) for entry in decoded):
        raise ModelError(f"{path} must hold a list of at most {max_entries} JSON objects.")
    return list(decoded)


def _read_json(path: Path, max_bytes: int) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise ModelNotFound(f"{path} does not exist.") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    if len(content) > max_bytes:
        raise ModelError(f"{path} is larger than {max_bytes} bytes.")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON.") from error


_INFINITE = {"__float__": "Infinity"}


class JsonFields:
    """Typed, bounded access to one JSON object. A field that is absent or null has its default.

    Every method raises ModelError naming the field when the value has the wrong type or lies out of bounds, or
    when there is neither value nor default.
    """

    __slots__ = ("_fields", "_where")

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where

    @property
    def where(self) -> str:
        """Return the place of the object, for errors."""
        return self._where

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._fields.get(name) is not None

    def is_set(self, name: str) -> bool:
        """Return whether the field is present, and neither null nor false."""
        return self._fields.get(name) not in (None, False)

    def is_present(self, name: str) -> bool:
        """Return whether the field is present, null included."""
        return name in self._fields

    def with_defaults(self, defaults: dict[str, Any]) -> "JsonFields":
        """Return the same object with these values of fields that are absent or null."""
        missing = {name: value for name, value in defaults.items() if not self.has(name)}
        return JsonFields({**self._fields, **missing}, self._where)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number in low..high."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, "must be a whole number")
        if not low <= value <= high:
            raise self.error(name, f"must be between {low} and {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number in low..high."""
        value = self._value(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.error(name, "must be a number")
        if not low <= value <= high or not math.isfinite(value):
            raise self.error(name, f"must be between {low:g} and {high:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string of at most 200 characters."""
        value = self._value(name, default)
        if not isinstance(value, str) or len(value) > 200:
            raise self.error(name, "must be a short string")
        return value

    def section(self, name: str) -> "JsonFields | None":
        """Return a nested object, or None when it is absent."""
        if not self.has(name):
            return None
        value = self._fields[name]
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return JsonFields(value, f"{self._where}, {name}")

    def sections(self, name: str, max_entries: int) -> "tuple[JsonFields, ...]":
        """Return the objects in a nested one, in order; none when it is absent."""
        outer = self.section(name)
        if outer is None:
            return ()
        if len(outer._fields) > max_entries:
            raise self.error(name, f"must have at most {max_entries} entries")
        inner = (outer.section(entry) for entry in outer._fields)
        return tuple(each for each in inner if each is not None)

    def names(self) -> tuple[str, ...]:
        """Return the names of all fields, in the file's order."""
        return tuple(self._fields)

    def num_entries(self, name: str) -> int:
        """Return the number of fields of a nested object; 0 when it is absent."""
        inner = self.section(name)
        return 0 if inner is None else len(inner._fields)

    def integer_of_each(self, name: str, count: int, low: int, high: int) -> tuple[int, ...]:
        """Return `count` whole numbers in low..high: of a list, or one number that holds for all."""
        values = self._value(name, None)
        if not isinstance(values, list):
            return (self.integer(name, low, high),) * count
        if len(values) != count:
            raise self.error(name, f"must be a whole number, or a list of {count}")
        return tuple(JsonFields({name: value}, self._where).integer(name, low, high) for value in values)

    def numbers(self, name: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """Return a list of exactly `count` finite numbers in low..high."""
        values = self._value(name, None)
        if not isinstance(values, list) or len(values) != count:
            raise self.error(name, f"must be a list of {count} numbers")
        return tuple(JsonFields({name: value}, self._where).number(name, low, high) for value in values)

    def interval(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """Return a list of two numbers, not below 0, the second of which is not below the first and may be infinite, as
        transformers spells that."""
        value = self._fields.get(name)
        if value is None:
            return default
        if isinstance(value, list):
            value = [math.inf if item == _INFINITE else item for item in value]
        if not isinstance(value, list) or len(value) != 2 or not all(type(item) in (int, float) for item in value):
            raise self.error(name, "must be a list of 2 numbers")
        low, high = value
        if not 0.0 <= low <= high:
            raise self.error(name, "must be a number from 0 on, and one that is not below it")
        return float(low), float(high)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """Return a list of whole numbers in low..high, at most as many; empty when the field is absent."""
        values = self._fields.get(name)
        if values is None:
            return ()
        if not isinstance(values, list) or len(values) > high - low + 1:
            raise self.error(name, f"must be a list of at most {high - low + 1} whole numbers")
        return tuple(JsonFields({name: value}, self._where).integer(name, low, high) for value in values)

    def texts(self, name: str, max_entries: int) -> tuple[str, ...]:
        """Return a list of strings; empty when the field is absent."""
        value = self._fields.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > max_entries or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"must be a list of at most {max_entries} strings")
        return tuple(value)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Return a token id, or the ids of a list; those outside of the vocabulary, such as -1, stand for no token."""
        value = self._fields.get(name)
        if value is None:
            return ()
        value = value.tolist() if hasattr(value, "tolist") else value  # an array of a GGUF file
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        if len(values) > 256 or not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise self.error(name, "must be a token id or a short list of them")
        return tuple(item for item in values if 0 <= item < vocab_size)

    def error(self, name: str, problem: str) -> ModelError:
        """Return the error to raise for this field."""
        return ModelError(f"{self._where}: {name} {problem}.")

    def _value(self, name: str, default: object) -> object:
        value = self._fields.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing")
        return value
