"""Divides an answer's text into content and tool calls, as it comes."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import orjson

from alignedserve.api.text_markers import MarkerFinder
from alignedserve.api.tools.formats import (
    HeaderCall,
    ObjectCall,
    ParameterCall,
    ParameterTags,
    TextParameters,
    ToolFormat,
)


class ToolCallDelta(NamedTuple):
    """A tool call that begins, or more of the arguments of one that has begun."""

    call_index: int  # of the call among those of its choice
    arguments: str = ""  # JSON text, to be appended to what came before
    call_id: str | None = None  # with the first delta of a call, as the name
    name: str | None = None


class OutputRun(NamedTuple):
    """A run of an answer's text: content, thought, text of calls, or none of these."""

    length: int  # characters of the answer
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


def tool_call_chunk(delta: ToolCallDelta) -> dict[str, Any]:
    if delta.call_id is None:
        return {"index": delta.call_index, "function": {"arguments": delta.arguments}}
    return {
        "index": delta.call_index,
        "id": delta.call_id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }


def function_call_chunk(delta: ToolCallDelta) -> dict[str, Any]:
    name = {"name": delta.name} if delta.name is not None else {}
    return {**name, "arguments": delta.arguments}


def whole_tool_calls(deltas: Iterable[ToolCallDelta]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.call_id is not None:
            call = {"id": delta.call_id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
            calls.append(call)
        calls[delta.call_index]["function"]["arguments"] += delta.arguments
    return calls


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
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_in_string = False
                self.is_complete = self._depth == 0
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


class ParameterReader:
    """A CallReader. Texts are passed on piece by piece, other values as a whole."""

    def __init__(
        self,
        tags: ParameterTags,
        texts: Mapping[str, TextParameters],
        new_id: Callable[[], str],
        *,
        is_opened: bool = False,
    ) -> None:
        """Make a reader. `texts`: of each function, the parameters that are no JSON.

        `is_opened`: calls begin with a name."""
        self._tags = tags
        # White space between the tags of names and values is not counted on.
        self._name_end, _, self._value_begin = tags.parameter_name_end.partition("\n")
        self._name_ends = (tags.function_name_end.strip() or tags.function_name_end, tags.parameter, tags.function_end)
        self._value_ends = (tags.value_end.rstrip("\n"), tags.value_end.strip())
        self._texts = texts
        self._new_id = new_id
        self._num_calls = 0
        self._num_parameters = 0
        self._call: OpenCall | None = None
        self._ended: OpenCall | None = None  # by the last step
        self._is_text = False
        self._begins_value = False  # nothing of the value came yet
        self._collected = ""  # of a name, or of a value that is JSON
        if is_opened:
            self._seek(self._name_ends, self._function_name)
        else:
            self._seek((tags.function,), self._in_between)

    def push(self, text: str) -> list[ToolCallDelta]:
        deltas: list[ToolCallDelta] = []
        while text:
            self._ended = None
            before, marker, text = self._finder.push(text)
            self._step(before, marker)
            for call in (self._ended, self._call):
                deltas += call.take() if call is not None else []
        return deltas

    def _seek(self, markers: tuple[str, ...], step: Callable[[str, str | None], None]) -> None:
        self._finder, self._step, self._collected = MarkerFinder(markers), step, ""

    def _in_between(self, _: str, marker: str | None) -> None:
        if marker == self._tags.function:
            self._seek(self._name_ends, self._function_name)
        elif marker == self._tags.parameter:
            self._seek((self._name_end,), self._parameter_name)
        elif marker == self._tags.function_end and self._call is not None:
            self._call.append("}" if self._num_parameters else "{}")
            self._ended, self._call = self._call, None
            self._seek((self._tags.function,), self._in_between)

    def _function_name(self, text: str, marker: str | None) -> None:
        self._collected += text
        if marker is not None:
            self._call = OpenCall(self._num_calls, self._new_id())
            self._call.name = self._collected.strip()
            self._num_calls += 1
            self._num_parameters = 0
            self._seek_parameter()
            if marker != self._name_ends[0]:  # a family's model may leave the end of a name out
                self._in_between("", marker)

    def _seek_parameter(self) -> None:
        self._seek((self._tags.parameter, self._tags.function_end), self._in_between)

    def _parameter_name(self, text: str, marker: str | None) -> None:
        self._collected += text
        if marker is None or self._call is None:
            return
        name = self._collected
        self._call.append(("{" if self._num_parameters == 0 else ", ") + f"{json.dumps(name, ensure_ascii=False)}: ")
        self._num_parameters += 1
        self._is_text = name in self._texts.get(self._call.name or "", {})
        self._begins_value = not self._value_begin
        self._call.append('"' if self._is_text else "")
        if self._value_begin:
            self._seek((self._value_begin,), self._before_value)
        else:
            self._seek(self._value_ends, self._value)

    def _before_value(self, _: str, marker: str | None) -> None:
        if marker is not None:
            self._seek(self._value_ends, self._value)

    def _value(self, text: str, marker: str | None) -> None:
        assert self._call is not None, "a value outside of a call"
        if self._begins_value and text:
            text, self._begins_value = text.removeprefix("\n"), False
        if self._is_text:
            self._call.append(json.dumps(text, ensure_ascii=False)[1:-1] + ('"' if marker is not None else ""))
        else:
            self._collected += text
            self._call.append(_as_json(self._collected) if marker is not None else "")
        if marker is not None:
            self._seek_parameter()


def _as_json(value: str) -> str:
    try:
        orjson.loads(value)  # which takes no NaN, as clients do not
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
    return value.strip()


_NO_TEXTS: Mapping[str, TextParameters] = {}


class HeaderReader:
    """A CallReader. `opening` stands before each name, `between` after it; `is_opened`: the first has come already.

    `is_numbered`: a colon and a number are behind the name, and no part of it."""

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

        `texts`: of each function, the parameters that a ParameterCall has as they are."""
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
            stripped = (self._leading + text).lstrip()
            if not stripped.startswith(self._first_character):
                return self._push_marked(text)
            leading, self._leading, self._is_reading = self._leading, "", True
            return [CallRun(len(leading)), self._read(text)]
        return self._push_marked(text)

    def end(self) -> list[CallRun]:
        held = self._leading + self._begin.flush()
        return [CallRun(len(held), held)] if held else []

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
