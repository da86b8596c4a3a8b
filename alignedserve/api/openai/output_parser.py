"""Divides the text of an answer into its thought, its content and its tool calls."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from alignedserve.api.harmony import MARKS, HarmonyParser
from alignedserve.api.reasoning import ReasoningFormat, ReasoningParser, ThoughtPart, ThoughtRun, ThoughtStart
from alignedserve.api.tools.call_parser import OutputRun, ToolCallParser
from alignedserve.api.tools.formats import TextParameters, ToolFormat
from alignedserve.text.token_texts import MARK_START, control_mark, split_marked
from alignedserve.text.tokenizer import Tokenizer


class TextOptions(NamedTuple):
    """Says what an answer shows beside its content."""

    shows_stop: bool = False  # the stop string, or the end token where it has text
    shows_special_tokens: bool = False
    has_every_logprob: bool = False  # those of thoughts, calls and the end token too, one for each of `token_ids`


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The parts that an answer may hold beside its content."""

    reasoning: ReasoningFormat | None = None  # None: no thought
    thought_start: ThoughtStart = ThoughtStart.UNDECIDED
    tools: ToolFormat | None = None  # None: no calls
    texts_of_tools: Mapping[str, TextParameters] = field(default_factory=dict)  # see ToolCallParser
    is_continued: bool = False  # the answer's text goes on with the prompt's
    must_call: bool = False  # the grammar lets the answer hold calls alone, beside a thought
    must_think: bool = False  # the grammar lets the answer begin with a thought alone, where the prompt has none

    @property
    def is_harmony(self) -> bool:
        """Return whether answers are messages in channels."""
        return self.reasoning is not None and self.reasoning.is_harmony

    def texts(self) -> str:
        """Return all texts that may hold control tokens."""
        if self.is_harmony:
            return "".join(MARKS)
        reasoning = (self.reasoning.begin, self.reasoning.end) if self.reasoning is not None else ()
        return "".join(reasoning) + (self.tools.texts() if self.tools is not None else "")

    def parser(self, tokenizer: Tokenizer) -> "OutputParser | None":
        """Return a parser for one answer; None: all of it is content."""
        if self.is_harmony:
            return HarmonyParser(
                tokenizer.marked, _new_id, has_tools=self.tools is not None, is_continued=self.is_continued
            )
        return None if self.reasoning is None and self.tools is None else MarkParser(self, tokenizer)


class OutputParser(Protocol):
    """Divides the text of one answer. The lengths of all runs together are the length of the text."""

    @property
    def is_reasoning(self) -> bool:
        """Return whether the answer is in its thought."""

    @property
    def has_calls(self) -> bool:
        """Return whether the answer has called a tool."""

    def push(self, text: str) -> list[OutputRun]:
        """Return the runs that this text completes."""

    def end(self) -> list[OutputRun]:
        """Return the runs of what was held back."""


class MarkParser:
    """An OutputParser of a thought between marks, and content and calls after it."""

    def __init__(self, form: OutputFormat, tokenizer: Tokenizer) -> None:
        self._must_call, self._must_think = form.must_call, form.must_think
        self._reasoning = self._tools = None
        if form.reasoning is not None:
            self._reasoning = ReasoningParser(form.reasoning.marked(tokenizer.marked), form.thought_start)
        if form.tools is not None:
            new_id = _new_short_id if form.tools.has_short_ids else _new_id
            self._tools = ToolCallParser(form.tools, tokenizer.marked, new_id, form.texts_of_tools)

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_thinking

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.has_calls

    def push(self, text: str) -> list[OutputRun]:
        runs = [ThoughtRun(ThoughtPart.ANSWER, text)] if self._reasoning is None else self._reasoning.push(text)
        return [parsed for run in runs for parsed in self._parse(run)]

    def end(self) -> list[OutputRun]:
        # The beginning of a mark is no content where nothing else may stand.
        is_mark = self._must_call or (self._must_think and self._reasoning is not None and self._reasoning.is_undecided)
        runs = [] if self._reasoning is None else self._reasoning.end()
        parsed = [parsed for run in runs for parsed in self._parse(run)]
        if self._tools is not None:
            parsed += [OutputRun(run.length, run.content) for run in self._tools.end()]
        return [run._replace(content="") for run in parsed] if is_mark else parsed

    def _parse(self, run: ThoughtRun) -> list[OutputRun]:
        if run.part is ThoughtPart.HIDDEN:
            return [OutputRun(len(run.text))]
        if run.part is ThoughtPart.THOUGHT:
            return [OutputRun(len(run.text), reasoning=run.text)]
        if self._tools is None:
            return [OutputRun(len(run.text), run.text)]
        calls = self._tools.push(run.text)
        return [OutputRun(call.length, call.content, "", call.tool_calls) for call in calls]


def unmarked(run: OutputRun, *, shows_names: bool) -> list[OutputRun]:
    """Return a parser's run in pieces of which none shows a `control_mark`.

    `shows_names`: control tokens where no parser looks for them have their plain names; they are hidden otherwise."""
    texts = (run.content, run.reasoning, *[call.arguments for call in run.tool_calls])
    if not any(MARK_START in text for text in texts):
        return [run]
    if run.tool_calls:
        calls = [call._replace(arguments=_plain(call.arguments, shows_names=shows_names)) for call in run.tool_calls]
        return [run._replace(tool_calls=tuple(calls))]
    if run.reasoning:
        return [OutputRun(length, reasoning=shown) for length, shown in _pieces(run.reasoning, shows_names=shows_names)]
    return [OutputRun(length, shown) for length, shown in _pieces(run.content, shows_names=shows_names)]


def _plain(text: str, *, shows_names: bool) -> str:
    return "".join([shown for _, shown in _pieces(text, shows_names=shows_names)])


def _pieces(text: str, *, shows_names: bool) -> Iterator[tuple[int, str]]:
    for number, piece in enumerate(split_marked(text)):
        if number % 2 == 0:
            yield len(piece), piece
        else:
            yield len(control_mark(piece)), piece if shows_names else ""


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _new_short_id() -> str:
    return secrets.token_hex(5)[:9]
