"""Reads calls that are a function's name, a mark, and the arguments, as their text comes."""

from collections.abc import Callable

from alignedserve.api.text_markers import MarkerFinder
from alignedserve.api.tools.deltas import ToolCallDelta
from alignedserve.api.tools.json_value import JsonValueScanner
from alignedserve.api.tools.object_reader import OpenCall


class HeaderReader:
    """A CallReader. `opening` stands before each name, `between` after it; `is_opened`: the first has come already.

    `is_numbered`: a colon and a number are behind the name, and no part of it.
    """

    def __init__(
        self, opening: str, between: str, new_id: Callable[[], str], *, is_opened: bool, is_numbered: bool = False
    ) -> None:
        self._is_numbered = is_numbered
        self._opening, self._between = opening, between
        self._new_id = new_id
        self._num_calls = 0
        self._call: OpenCall | None = None
        self._name = ""
        self._scanner = JsonValueScanner()
        self._is_in_name = is_opened
        self._finder = MarkerFinder((between if is_opened else opening,))

    def push(self, text: str) -> list[ToolCallDelta]:
        """Return what the text adds to the calls."""
        deltas: list[ToolCallDelta] = []
        while text:
            text = self._read_arguments(text, deltas) if self._call is not None else self._find(text)
        return deltas

    def _find(self, text: str) -> str:
        """Go on to the next mark; return the text after it."""
        before, marker, after = self._finder.push(text)
        if self._is_in_name:
            self._name += before
        if marker is None:
            return ""
        if self._is_in_name:
            self._begin_call()
        else:
            self._is_in_name, self._name = True, ""
            self._finder = MarkerFinder((self._between,))
        return after

    def _begin_call(self) -> None:
        self._call = OpenCall(self._num_calls, self._new_id())
        name = self._name.strip()
        before, _, number = name.rpartition(":")
        self._call.name = before if self._is_numbered and number.isdecimal() else name
        self._num_calls += 1
        self._scanner = JsonValueScanner()

    def _read_arguments(self, text: str, deltas: list[ToolCallDelta]) -> str:
        """Read to the end of the arguments, or of the text; return the text after them."""
        assert self._call is not None, "arguments of no call"
        taken = 0
        while taken < len(text) and not self._scanner.is_complete and self._scanner.takes(text[taken]):
            taken += 1
        self._call.append(text[:taken])
        deltas += self._call.take()
        if self._scanner.is_complete:
            self._call, self._is_in_name = None, False
            self._finder = MarkerFinder((self._opening,))
        return text[taken:]
