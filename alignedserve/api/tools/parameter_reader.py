"""Reads calls whose arguments are parameters between tags, as their text comes, into JSON."""

import json
from collections.abc import Callable, Mapping

import orjson

from alignedserve.api.text_markers import MarkerFinder
from alignedserve.api.tools.deltas import ToolCallDelta
from alignedserve.api.tools.object_reader import OpenCall
from alignedserve.api.tools.parameters import ParameterTags, TextParameters


class ParameterReader:
    """A CallReader. Texts are given on as they come, other values once they are whole."""

    def __init__(
        self,
        tags: ParameterTags,
        texts: Mapping[str, TextParameters],
        new_id: Callable[[], str],
        *,
        is_opened: bool = False,
    ) -> None:
        """Make a reader. `texts`: of each function, the parameters that are no JSON.

        `is_opened`: calls begin with a name.
        """
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
