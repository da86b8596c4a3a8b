"""Reads JSON values, and calls that are JSON objects of a name and arguments, as their text comes."""

import json
from collections.abc import Callable
from typing import Protocol

from alignedserve.api.tools.deltas import ToolCallDelta

_OPENING, _CLOSING = "{[", "}]"
_ENDS_SCALAR = ",}] \t\r\n"

_SPACE = " \t\r\n"


class JsonValueScanner:
    """Says of each character whether it belongs to the value, and after it whether the value is complete."""

    def __init__(self) -> None:
        self.is_complete = False
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._is_scalar = False  # a number or a word, which only the next character ends

    def takes(self, character: str) -> bool:
        if self._is_in_string:
            self._continue_string(character)
        elif self._is_scalar and self._depth == 0:
            self.is_complete = character in _ENDS_SCALAR
            return not self.is_complete
        elif character == '"':
            self._is_in_string = True
        elif character in _OPENING:
            self._depth += 1
        elif character in _CLOSING:
            self._depth -= 1
            self.is_complete = self._depth == 0
        else:
            self._is_scalar = self._depth == 0
        return True

    def _continue_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False
            self.is_complete = self._depth == 0


class CallReader(Protocol):
    """Reads the text of an answer's calls, from after the marker that begins them."""

    def push(self, text: str) -> list[ToolCallDelta]:
        """Return what the text adds to the calls; all that is not part of one is skipped."""


class OpenCall:
    """The call that is being read: its deltas wait until its name is known."""

    def __init__(self, call_index: int, call_id: str) -> None:
        self.name: str | None = None
        self._call_index = call_index
        self._call_id = call_id
        self._is_announced = False
        self._arguments: list[str] = []

    def append(self, text: str) -> None:
        self._arguments.append(text)

    def take(self) -> list[ToolCallDelta]:
        arguments, is_first = "".join(self._arguments), not self._is_announced
        if self.name is None or not (arguments or is_first):
            return []
        self._is_announced = True
        self._arguments.clear()
        if is_first:
            return [ToolCallDelta(self._call_index, arguments, self._call_id, self.name)]
        return [ToolCallDelta(self._call_index, arguments)]


class ObjectReader:
    """A CallReader of objects, in a list or one after the other, with their keys in any order."""

    def __init__(self, arguments_key: str, new_id: Callable[[], str]) -> None:
        self._arguments_key = arguments_key
        self._new_id = new_id
        self._num_calls = 0
        self._call: OpenCall | None = None
        self._key = ""
        self._scanner: JsonValueScanner | None = None
        self._value: list[str] = []
        self._step: Callable[[str], None] = self._seek_object

    def push(self, text: str) -> list[ToolCallDelta]:
        deltas: list[ToolCallDelta] = []
        for character in text:
            call = self._call
            self._step(character)
            if call is not None and self._call is None:
                deltas += call.take()
        return deltas + (self._call.take() if self._call is not None else [])

    def _seek_object(self, character: str) -> None:
        if character == "{":
            self._call = OpenCall(self._num_calls, self._new_id())
            self._num_calls += 1
            self._step = self._seek_key

    def _seek_key(self, character: str) -> None:
        if character == '"':
            self._begin_value(self._end_key)
            self._read(character)
        elif character == "}":
            if self._call is not None and self._call.name is None:
                self._num_calls -= 1  # no delta has shown it
            self._call, self._step = None, self._seek_object

    def _end_key(self, text: str) -> None:
        self._key = _string(text)
        self._step = self._seek_value

    def _seek_value(self, character: str) -> None:
        if character not in _SPACE + ":":
            self._begin_value(self._end_value)
            self._read(character)

    def _begin_value(self, when_complete: Callable[[str], None]) -> None:
        self._scanner, self._value = JsonValueScanner(), []
        self._when_complete = when_complete
        self._step = self._read

    def _read(self, character: str) -> None:
        assert self._scanner is not None, "no value is being read"
        takes = self._scanner.takes(character)
        if takes:
            self._value.append(character)
            self._stream(character)
        if self._scanner.is_complete:
            self._when_complete("".join(self._value))
            if not takes:  # it ended a number or a word, and is more than that
                self._step(character)

    def _stream(self, character: str) -> None:
        if self._call is not None and self._is_arguments and self._value[0] != '"':
            self._call.append(character)

    def _end_value(self, text: str) -> None:
        assert self._call is not None, "a value outside of an object"
        if self._key == "name":
            self._call.name = _string(text)
        elif self._is_arguments and text.startswith('"'):
            self._call.append(_string(text))
        self._step = self._seek_key

    @property
    def _is_arguments(self) -> bool:
        return self._when_complete == self._end_value and self._key == self._arguments_key


def _string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
