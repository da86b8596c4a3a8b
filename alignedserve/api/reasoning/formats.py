"""How families of models mark the thought before an answer."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from alignedserve.config.sections import REASONING_FORMATS


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
