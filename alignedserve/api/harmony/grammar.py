"""Holds an answer in harmony's channels to its tools, its constraint and the budget of its thoughts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alignedserve.api.harmony import marks
from alignedserve.api.reasoning.formats import ReasoningFormat, lazy, thought_rules
from alignedserve.api.tools.call_grammar import CallableTool
from alignedserve.runtime.grammar.lark import json_value, quoted

_THOUGHT = ReasoningFormat(marks.CHANNEL + marks.ANALYSIS + marks.MESSAGE, marks.END)
_PREAMBLE = marks.CHANNEL + marks.COMMENTARY + marks.MESSAGE
_TEXT = "TEXT: /(?s:.*)/"
_CALL_HEADERS = (  # as answers have it, and as the chat template shows it
    (f"{marks.CHANNEL}{marks.COMMENTARY} to={marks.FUNCTIONS}", f" {marks.CONSTRAIN}json{marks.MESSAGE}"),
    (f" to={marks.FUNCTIONS}", f"{marks.CHANNEL}{marks.COMMENTARY} json{marks.MESSAGE}"),
)


@dataclass(frozen=True, slots=True)
class HarmonyGrammar:
    """The messages of an answer: thoughts, words to the user before a call, and at the end a call or the answer."""

    tools: Sequence[CallableTool] = ()  # of which one may be called
    must_call: bool = False
    has_content_part: bool = False  # the answer is the part `@content`; nothing else is said to the user
    budget: int | None = None  # tokens of the thought
    is_continued: bool = False  # the prompt ends inside of the answer

    def rules(self, literal: Callable[[str], str], *, call_end: str) -> str:
        """Return the rules. `call_end` stands after a call; empty where its token ends an answer anyway."""
        text = "@content" if self.has_content_part else "TEXT"
        if self.is_continued:
            return f"start: {text}\n{_TEXT}"
        final = f"{literal(marks.CHANNEL)} {quoted(marks.FINAL)} {literal(marks.MESSAGE)} {text}"
        lasts = [*([] if self.must_call else ["final"]), *(["call"] if self.tools else [])]
        rules = [
            _TEXT,
            f"start: {self._before()} ({' | '.join(lasts)})",
            f"final: {final}",
            f"turn: {literal(marks.START)} {quoted(marks.ASSISTANT)}",
            "analysis: open thought turn",
            thought_rules(_THOUGHT, literal, self.budget),
        ]
        return "\n".join([*rules, *(self._tool_rules(literal, call_end) if self.tools else [])])

    def _before(self) -> str:
        """Return what may come before the last message: thoughts, only one if it is bounded, and words to the user."""
        has_preambles = bool(self.tools) and not self.has_content_part
        if self.budget is not None:
            return "analysis? preamble*" if has_preambles else "analysis?"
        return "(analysis | preamble)*" if has_preambles else "analysis*"

    def _tool_rules(self, literal: Callable[[str], str], call_end: str) -> list[str]:
        end = literal(marks.END)
        rules = [
            f"preamble: {literal(_PREAMBLE)} said turn",
            f"said{lazy(end)}: TEXT {end}",
        ]
        options = []
        for place, tool in enumerate(self.tools):
            rules.append(f"arguments_{place}: {json_value(tool.arguments)}")
            headers = [literal(before + tool.name + after) for before, after in _CALL_HEADERS]
            options.append(f"({' | '.join(headers)}) arguments_{place} {literal(call_end)}")
        return [*rules, f"call: {' | '.join(options)}"]
