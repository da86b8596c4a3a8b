"""How families of models mark the thought before an answer."""

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass

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
        """Return the format with its control tokens as the answer's text has them."""
        return ReasoningFormat(mark(self.begin), mark(self.end))


class ThoughtStart(enum.Enum):
    """What the prompt leaves to the answer."""

    OPEN = "open"  # the prompt begins the thought
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
    return next((one for one in FORMATS.values() if one.begin in template and one.end in template), None)


def thought_start(prompt_end: str, form: ReasoningFormat) -> ThoughtStart:
    """Return what a prompt that ends in this text leaves to the answer."""
    end = prompt_end.rstrip()
    if end.endswith(form.begin):
        return ThoughtStart.OPEN
    return ThoughtStart.CLOSED if end.endswith(form.end) else ThoughtStart.UNDECIDED


def effort_variables(effort: str, known: Collection[str]) -> dict[str, str | bool] | None:
    """Return the template's variables for this effort, of the names that it reads; None: it has none for it."""
    found: dict[str, str | bool] = {}
    if _LEVELS in known:
        found[_LEVELS] = effort
    found |= {name: effort != "none" for name in _SWITCHES if name in known}
    return found or ({} if effort == "none" else None)


def thought_symbol(start: ThoughtStart, *, is_bounded: bool) -> str:
    """Return what the answer begins with; empty: with no thought."""
    if start is ThoughtStart.CLOSED:
        return ""
    if start is ThoughtStart.OPEN:
        return "thought"
    # A bound would be worth nothing if the same text could count as no thought.
    return "open thought" if is_bounded else "(open thought)?"


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
