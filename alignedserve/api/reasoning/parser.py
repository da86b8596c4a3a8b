"""Divides an answer's text into its thought and the rest, as it comes."""

import enum
from typing import NamedTuple

from alignedserve.api.reasoning.formats import ReasoningFormat, ThoughtStart
from alignedserve.api.text_markers import MarkerFinder


class Part(enum.Enum):
    """What a run of text belongs to."""

    THOUGHT = "thought"
    ANSWER = "answer"
    HIDDEN = "hidden"  # markers, and the white space beside them


class Run(NamedTuple):
    """A run of text of one part."""

    part: Part
    text: str


class ReasoningParser:
    """Divides the text of one answer. The runs of all pushes together are the whole text, in order."""

    def __init__(self, form: ReasoningFormat, start: ThoughtStart) -> None:
        self.is_thinking = start is ThoughtStart.OPEN
        self._form = form
        self._end = MarkerFinder((form.end,))
        self._is_undecided = start is ThoughtStart.UNDECIDED
        self._is_after_marker = start is not ThoughtStart.UNDECIDED  # white space is hidden there
        self._held = ""

    def push(self, text: str) -> list[Run]:
        """Return the runs that this text completes."""
        runs: list[Run] = []
        if self._is_undecided:
            text = self._decide(self._held + text, runs)
        while text and self.is_thinking:
            text = self._think(text, runs)
        if text:
            self._append(Part.ANSWER, text, runs)
        return runs

    def end(self) -> list[Run]:
        """Return the runs of what was held back."""
        runs: list[Run] = []
        self._append(Part.ANSWER, self._held, runs)
        self._append(Part.THOUGHT, self._end.flush(), runs)
        return runs

    def _decide(self, text: str, runs: list[Run]) -> str:
        """Find out whether a thought begins; return the text after that is known, and its marker."""
        begin, stripped = self._form.begin, text.lstrip()
        if begin.startswith(stripped) and stripped != begin:
            self._held = text
            return ""
        self._is_undecided, self._held = False, ""
        if not stripped.startswith(begin):
            return text
        self.is_thinking = self._is_after_marker = True
        rest = stripped[len(begin) :]
        runs.append(Run(Part.HIDDEN, text[: len(text) - len(rest)]))
        return rest

    def _think(self, text: str, runs: list[Run]) -> str:
        before, marker, after = self._end.push(text)
        self._append(Part.THOUGHT, before, runs)
        if marker is not None:
            runs.append(Run(Part.HIDDEN, marker))
            self.is_thinking, self._is_after_marker = False, True
        return after

    def _append(self, part: Part, text: str, runs: list[Run]) -> None:
        """Append a run, without the white space that follows a marker."""
        if self._is_after_marker:
            stripped = text.lstrip()
            if stripped != text:
                runs.append(Run(Part.HIDDEN, text[: len(text) - len(stripped)]))
            text = stripped
        if text:
            self._is_after_marker = False
            runs.append(Run(part, text))
