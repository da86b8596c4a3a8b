"""Divides an answer's text into content and tool calls, as it comes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from alignedserve.api.text_markers import MarkerFinder
from alignedserve.api.tools.deltas import ToolCallDelta
from alignedserve.api.tools.formats import HeaderCall, ObjectCall, ParameterCall, ToolFormat
from alignedserve.api.tools.object_reader import CallReader, JsonValueScanner, ObjectReader, OpenCall
from alignedserve.api.tools.parameter_reader import ParameterReader
from alignedserve.api.tools.parameters import TextParameters

_NO_TEXTS: Mapping[str, TextParameters] = {}


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
        deltas: list[ToolCallDelta] = []
        while text:
            text = self._read_arguments(text, deltas) if self._call is not None else self._find(text)
        return deltas

    def _find(self, text: str) -> str:
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


class CallRun(NamedTuple):
    """A run of an answer's text: content, or text of calls and what it adds to them."""

    length: int  # characters of the answer
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ToolCallParser:
    """Divides the text of one answer. Content ends where calls begin."""

    def __init__(
        self,
        form: ToolFormat,
        marked: Callable[[str], str],
        new_id: Callable[[], str],
        texts: Mapping[str, TextParameters] = _NO_TEXTS,
    ) -> None:
        """Make a parser. `marked`: writes the control tokens in a text as the answer's text has them.

        `texts`: of each function, the parameters that a ParameterCall has as they are.
        """
        self.has_calls = False
        if isinstance(form.call, ParameterCall):
            tags, is_opened = form.call.tags.marked(marked), form.call.is_opened
            self._reader: CallReader = ParameterReader(tags, texts, new_id, is_opened=is_opened)
        else:
            self._reader = _reader(form, marked, new_id)
        self._is_bare = not form.begin
        self._first_character = form.first_character
        self._begin = MarkerFinder([marked(begin) for begin in (form.begin, form.optional_begin) if begin])
        self._is_reading = False
        self._leading = ""  # white space before anything else is no content where calls follow
        self._has_content = False

    def push(self, text: str) -> list[CallRun]:
        if self._is_reading:
            return [self._read(text)]
        if self._is_bare and not self._has_content:
            return self._push_bare(text)
        return self._push_marked(text)

    def end(self) -> list[CallRun]:
        held = self._leading + self._begin.flush()
        return [CallRun(len(held), held)] if held else []

    def _push_bare(self, text: str) -> list[CallRun]:
        stripped = (self._leading + text).lstrip()
        if not stripped.startswith(self._first_character):
            return self._push_marked(text)
        leading, self._leading, self._is_reading = self._leading, "", True
        return [CallRun(len(leading)), self._read(text)]

    def _push_marked(self, text: str) -> list[CallRun]:
        before, marker, after = self._begin.push(text)
        before, self._leading = self._leading + before, ""
        if marker is None:
            return self._content(before)
        self._is_reading = True
        runs = self._content(before) if self._has_content or before.strip() else [CallRun(len(before))]
        return [*runs, CallRun(len(marker)), self._read(after)]

    def _content(self, text: str) -> list[CallRun]:
        if not self._has_content and not text.strip():
            self._leading = text
            return []
        self._has_content = True
        return [CallRun(len(text), text)] if text else []

    def _read(self, text: str) -> CallRun:
        deltas = tuple(self._reader.push(text))
        self.has_calls = self.has_calls or bool(deltas)
        return CallRun(len(text), "", deltas)


def _reader(form: ToolFormat, marked: Callable[[str], str], new_id: Callable[[], str]) -> CallReader:
    if isinstance(form.call, HeaderCall):
        opening, between = marked(form.call.opening), marked(form.call.between)
        is_opened = form.begin.endswith(form.call.opening)
        return HeaderReader(opening, between, new_id, is_opened=is_opened, is_numbered=form.call.is_numbered)
    assert isinstance(form.call, ObjectCall), "parameters have a reader of their own"
    return ObjectReader(form.call.arguments_key, new_id)
