"""Divides an answer in harmony's channels into thoughts, content and calls, as its text comes."""

import enum
import re
from collections.abc import Callable

from alignedserve.api.harmony import marks
from alignedserve.api.text_markers import MarkerFinder, overlap_len
from alignedserve.api.tools.deltas import OutputRun, ToolCallDelta

_BODY_ENDS = (marks.END, marks.CALL, marks.RETURN, marks.START, marks.CHANNEL)
_BEGINNINGS = (*marks.MARKS, marks.ASSISTANT, "to=")  # of a header
_MAX_HEADER_LEN = 512  # characters; what is longer is none
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(marks.CHANNEL) + r"\s*([a-z]*)")
_SEPARATOR = "\n\n"  # between two messages to the user, or two thoughts


class _Kind(enum.Enum):
    """The kind of a message's content."""

    THOUGHT = "thought"
    CONTENT = "content"
    CALL = "call"


class HarmonyParser:
    """Divides the text of one answer. The lengths of all runs together are the length of the text.

    What comes without a header is content, so that nothing is lost of a model that does not keep to its form.
    """

    def __init__(
        self, marked: Callable[[str], str], new_id: Callable[[], str], *, has_tools: bool, is_continued: bool = False
    ) -> None:
        """Make a parser. `marked`: writes control tokens as the answer's text has them.

        `has_tools`: messages to functions are calls, not content. `is_continued`: the prompt ends inside of a message
        to the user.
        """
        self.has_calls = False
        self._marked = {marked(mark): mark for mark in marks.MARKS}
        self._beginnings = [marked(beginning) for beginning in _BEGINNINGS]
        self._message = marked(marks.MESSAGE)
        self._ends = [marked(end) for end in _BODY_ENDS]
        self._new_id = new_id
        self._has_tools = has_tools
        self._num_calls = 0
        self._header: str | None = None if is_continued else ""  # of the next message; None: inside of a message
        self._body = MarkerFinder(self._ends)
        self._kind = _Kind.CONTENT
        self._has_text = {_Kind.THOUGHT: False, _Kind.CONTENT: False}

    @property
    def is_reasoning(self) -> bool:
        """Return whether the answer is in a thought."""
        return self._header is None and self._kind is _Kind.THOUGHT

    def push(self, text: str) -> list[OutputRun]:
        """Return the runs that this text completes."""
        runs: list[OutputRun] = []
        while text:
            text = self._read_header(text, runs) if self._header is not None else self._read_body(text, runs)
        return runs

    def end(self) -> list[OutputRun]:
        """Return the runs of what was held back."""
        held, self._header = self._header, None
        if held is None:
            return self._runs(self._body.flush())
        if not self._is_header(held) or self._plain(held).strip().startswith(marks.MARKS):
            return [OutputRun(len(held))]
        self._kind = _Kind.CONTENT
        return self._runs(held)

    def _read_header(self, text: str, runs: list[OutputRun]) -> str:
        """Read up to the text of a message; return what comes after its header."""
        header = (self._header or "") + text
        before, mark, after = header.partition(self._message)
        if not self._is_header(before, is_whole=bool(mark)):
            self._header, self._kind = None, _Kind.CONTENT
            return header
        if not mark:
            self._header = header
            return ""
        runs.append(OutputRun(len(before) + len(mark)))
        self._begin(self._plain(before), runs)
        return after

    def _is_header(self, text: str, *, is_whole: bool = False) -> bool:
        """Return whether this is a header, or unless it is whole, may become one."""
        stripped = text.lstrip()
        if len(text) - overlap_len(text, self._message) > _MAX_HEADER_LEN:
            return False
        if not stripped or any(stripped.startswith(one) for one in self._beginnings):
            return True
        return not is_whole and any(one.startswith(stripped) for one in self._beginnings)

    def _plain(self, text: str) -> str:
        """Return the text with control tokens by their plain names."""
        for written, mark in self._marked.items():
            text = text.replace(written, mark)
        return text

    def _begin(self, header: str, runs: list[OutputRun]) -> None:
        """Begin the message of this header."""
        self._header = None
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        if recipient is not None and self._has_tools and recipient[1] != marks.ASSISTANT:
            self._kind, self.has_calls = _Kind.CALL, True
            name = recipient[1].removeprefix(marks.FUNCTIONS)
            call = ToolCallDelta(self._num_calls, call_id=self._new_id(), name=name)
            self._num_calls += 1
            runs.append(OutputRun(0, tool_calls=(call,)))
            return
        is_thought = channel is not None and channel[1] == marks.ANALYSIS
        self._kind = _Kind.THOUGHT if is_thought else _Kind.CONTENT
        if self._has_text[self._kind]:
            runs.append(OutputRun(0, reasoning=_SEPARATOR) if is_thought else OutputRun(0, _SEPARATOR))

    def _read_body(self, text: str, runs: list[OutputRun]) -> str:
        """Read up to the end of a message; return what comes after it."""
        before, mark, after = self._body.push(text)
        runs += self._runs(before)
        if mark is None:
            return ""
        if self._marked[mark] in (marks.START, marks.CHANNEL):
            self._header = ""  # it belongs to the next message's header
            return mark + after
        runs.append(OutputRun(len(mark)))
        self._header = ""
        return after

    def _runs(self, text: str) -> list[OutputRun]:
        """Return the run of a message's text."""
        if not text:
            return []
        if self._kind is _Kind.CALL:
            return [OutputRun(len(text), tool_calls=(ToolCallDelta(self._num_calls - 1, text),))]
        self._has_text[self._kind] = True
        return [OutputRun(len(text), reasoning=text) if self._kind is _Kind.THOUGHT else OutputRun(len(text), text)]
