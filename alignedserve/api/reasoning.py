"""How families of models mark the thought before an answer."""

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.api.text_markers import MarkerFinder
from alignedserve.config.sections import REASONING_FORMATS

_SWITCHES = ("enable_thinking", "thinking")  # of templates that only know on and off
_LEVELS = "reasoning_effort"  # of templates that know levels


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A thought stands between `begin` and `end`, before the answer."""

    begin: str
    end: str
    is_harmony: bool = False  # answers are messages in channels: `gateway.harmony` reads and holds them

    def marked(self, mark: Callable[[str], str]) -> "ReasoningFormat":
        return ReasoningFormat(mark(self.begin), mark(self.end))


class ThoughtStart(enum.Enum):
    """What the prompt leaves to the answer."""

    OPEN = "open"  # the prompt begins the thought
    INSIDE = "inside"  # the prompt ends within the thought, of which the answer is the rest
    CLOSED = "closed"  # the prompt holds an empty one: the answer has none
    UNDECIDED = "undecided"  # the answer begins one, or not


# Each name with the markers of its family. `think`: DeepSeek-R1, Qwen3, QwQ, SmolLM3, GLM-4.5 and many more.
FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "magistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "command_a": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "gpt_oss": ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", is_harmony=True),
}
assert tuple(FORMATS) == REASONING_FORMATS, "the configuration knows other names"


def find_reasoning_format(name: str | None, template: str) -> ReasoningFormat | None:
    """Return the configured format, or that of the template, which mentions both markers; None: no reasoning model."""
    if name is not None:
        return FORMATS[name]
    return next((form for form in FORMATS.values() if form.begin in template and form.end in template), None)


def thought_start(prompt_end: str, form: ReasoningFormat, continued: str = "") -> ThoughtStart:
    """Return what a prompt that ends in this text leaves to the answer.

    `continued`: the last message, where the answer goes on with it."""
    end = prompt_end.rstrip()
    if end.endswith(form.begin):
        return ThoughtStart.OPEN
    if end.endswith(form.end):
        return ThoughtStart.CLOSED
    is_inside = continued.rfind(form.begin) > continued.rfind(form.end)
    return ThoughtStart.INSIDE if is_inside else ThoughtStart.UNDECIDED


def open_marks(text: str) -> str:
    return "".join(form.begin for form in FORMATS.values() if text.rfind(form.begin) > text.rfind(form.end))


def effort_variables(effort: str, known: Collection[str]) -> dict[str, str | bool] | None:
    """Return the template's variables for this effort, of the names that it reads; None: it has none for it."""
    variables: dict[str, str | bool] = {}
    if _LEVELS in known:
        variables[_LEVELS] = effort
    variables |= {name: effort != "none" for name in _SWITCHES if name in known}
    return variables or ({} if effort == "none" else None)


def thought_symbols(start: ThoughtStart, gap: str, *, is_bounded: bool) -> str:
    """Return what the answer begins with, the gap behind a thought included; empty: with no thought."""
    if start is ThoughtStart.CLOSED:
        return ""
    if start in (ThoughtStart.OPEN, ThoughtStart.INSIDE):
        return f"thought {gap}"
    # A bound would be worth nothing if the same text could count as no thought.
    return f"open thought {gap}" if is_bounded else f"(open thought {gap})?"


def thought_rules(form: ReasoningFormat, literal: Callable[[str], str], budget: int | None) -> str:
    """Return the rules of `open`, the mark that begins a thought, and `thought`, from after it to its end mark."""
    begin, end = literal(form.begin), literal(form.end)
    rules = [f"open{lazy(begin)}: {begin}"]
    if budget is None:
        return "\n".join([*rules, f"thought{lazy(end)}: TEXT {end}"])
    if budget == 0:
        return "\n".join([*rules, f"thought: {end}"])
    rules.append(f"cut[max_tokens={budget}]: TEXT")
    if not lazy(end):
        return "\n".join([*rules, f"thought: cut {end}"])
    # When both are used up it is the first that goes on.
    return "\n".join([*rules, f"thought: cut {end} | whole", f"whole[lazy, max_tokens={budget}]: TEXT {end}"])


def lazy(literal: str) -> str:
    """Return the attribute of a rule that ends in this mark: one written as text ends the text before it at once."""
    return "" if literal.startswith("<[") else "[lazy]"


class ThoughtPart(enum.Enum):
    """What a run of text belongs to."""

    THOUGHT = "thought"
    ANSWER = "answer"
    HIDDEN = "hidden"  # markers, and the white space beside them


class ThoughtRun(NamedTuple):
    """A run of text of one part."""

    part: ThoughtPart
    text: str


class ReasoningParser:
    """Divides the text of one answer. The runs of all pushes together are the whole text, in order."""

    def __init__(self, form: ReasoningFormat, start: ThoughtStart) -> None:
        self.is_thinking = start in (ThoughtStart.OPEN, ThoughtStart.INSIDE)
        self._form = form
        self._end = MarkerFinder((form.end,))
        self.is_undecided = start is ThoughtStart.UNDECIDED
        self._is_after_marker = start in (ThoughtStart.OPEN, ThoughtStart.CLOSED)  # white space is hidden there
        self._held = ""

    def push(self, text: str) -> list[ThoughtRun]:
        runs: list[ThoughtRun] = []
        if self.is_undecided:
            text = self._decide(self._held + text, runs)
        while text and self.is_thinking:
            text = self._think(text, runs)
        if text:
            self._append(ThoughtPart.ANSWER, text, runs)
        return runs

    def end(self) -> list[ThoughtRun]:
        runs: list[ThoughtRun] = []
        self._append(ThoughtPart.ANSWER, self._held, runs)
        self._append(ThoughtPart.THOUGHT, self._end.flush(), runs)
        return runs

    def _decide(self, text: str, runs: list[ThoughtRun]) -> str:
        begin, stripped = self._form.begin, text.lstrip()
        if begin.startswith(stripped) and stripped != begin:
            self._held = text
            return ""
        self.is_undecided, self._held = False, ""
        if not stripped.startswith(begin):
            return text
        self.is_thinking = self._is_after_marker = True
        rest = stripped[len(begin) :]
        runs.append(ThoughtRun(ThoughtPart.HIDDEN, text[: len(text) - len(rest)]))
        return rest

    def _think(self, text: str, runs: list[ThoughtRun]) -> str:
        before, marker, after = self._end.push(text)
        self._append(ThoughtPart.THOUGHT, before, runs)
        if marker is not None:
            runs.append(ThoughtRun(ThoughtPart.HIDDEN, marker))
            self.is_thinking, self._is_after_marker = False, True
        return after

    def _append(self, part: ThoughtPart, text: str, runs: list[ThoughtRun]) -> None:
        if self._is_after_marker:
            stripped = text.lstrip()
            if stripped != text:
                runs.append(ThoughtRun(ThoughtPart.HIDDEN, text[: len(text) - len(stripped)]))
            text = stripped
        if text:
            self._is_after_marker = False
            runs.append(ThoughtRun(part, text))
