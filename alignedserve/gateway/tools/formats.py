"""How families of models write tool calls.

An answer that calls tools is `begin`, `prefix`, its calls with `separator` between them, `suffix`. Names of control
tokens stand in these texts as they are; a model's tokenizer tells which of them are tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.config.sections import TOOL_FORMATS
from alignedserve.gateway.tools.prompts import CALLS_PROMPT, LIST_PROMPT


@dataclass(frozen=True, slots=True)
class ObjectCall:
    """A call is a JSON object of `name` and its arguments."""

    arguments_key: str = "arguments"

    def before_arguments(self, name: str) -> str:
        """Return the text of a call of this function up to its arguments."""
        return f'{{"name": "{name}", "{self.arguments_key}": '

    @property
    def after_arguments(self) -> str:
        """Return the text that ends a call."""
        return "}"


@dataclass(frozen=True, slots=True)
class HeaderCall:
    """A call is the function's name, `between`, and its arguments; `opening` is what stands before a name."""

    opening: str
    between: str

    def before_arguments(self, name: str) -> str:
        """Return the text of a call of this function up to its arguments."""
        return name + self.between

    @property
    def after_arguments(self) -> str:
        """Return the text that ends a call."""
        return ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's way to write calls."""

    begin: str  # where calls begin; empty: with the answer, whose first character tells
    prefix: str = ""
    separator: str = ""
    suffix: str = ""
    call: ObjectCall | HeaderCall = ObjectCall()
    hints: tuple[str, ...] = ()  # any of these in a chat template means that the model writes so
    optional_begin: str = ""  # a control token that may stand before calls without `begin`
    prompt: str | None = None  # tells tools to models whose template cannot; None: there is no way
    has_short_ids: bool = False  # templates want ids of nine letters and digits

    def text_of(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return an answer that makes these calls, each a name and the text of its arguments."""
        written = [
            self.call.before_arguments(name) + arguments + self.call.after_arguments for name, arguments in calls
        ]
        return self.begin + self.prefix + self.separator.join(written) + self.suffix

    def texts(self) -> str:
        """Return all texts that may hold control tokens."""
        between = self.call.between if isinstance(self.call, HeaderCall) else ""
        return self.begin + self.prefix + self.separator + self.suffix + between + self.optional_begin

    @property
    def first_character(self) -> str:
        """Return the character that tells calls without `begin` from content."""
        return (self.prefix or "{")[0]


# DeepSeek's control tokens have a full-width bar and a block for the underscore.
_DEEPSEEK = {
    name: f"<\uff5ctool\u2581{name.replace('_', chr(0x2581))}\uff5c>"
    for name in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")
}
# The first whose hint a template has is its own, so the narrower come first.
FORMATS = {
    "smollm2": ToolFormat(
        "<tool_call>",
        prefix="[",
        separator=", ",
        suffix="]</tool_call>",
        hints=("named SmolLM,",),
        prompt=LIST_PROMPT,
    ),
    "functionary": ToolFormat(
        "<function=",
        separator="</function>\n<function=",
        suffix="</function>",
        call=HeaderCall("<function=", ">"),
        hints=("<function=",),
    ),
    "deepseek_v31": ToolFormat(
        _DEEPSEEK["calls_begin"],
        prefix=_DEEPSEEK["call_begin"],
        separator=_DEEPSEEK["call_end"] + _DEEPSEEK["call_begin"],
        suffix=_DEEPSEEK["call_end"] + _DEEPSEEK["calls_end"],
        call=HeaderCall(_DEEPSEEK["call_begin"], _DEEPSEEK["sep"]),
        hints=(_DEEPSEEK["calls_begin"],),
    ),
    "mistral_args": ToolFormat(
        "[TOOL_CALLS]",
        separator="[TOOL_CALLS]",
        call=HeaderCall("[TOOL_CALLS]", "[ARGS]"),
        hints=("[ARGS]",),
        has_short_ids=True,
    ),
    "mistral": ToolFormat(
        "[TOOL_CALLS]", prefix="[", separator=", ", suffix="]", hints=("[TOOL_CALLS]",), has_short_ids=True
    ),
    "hermes": ToolFormat(
        "<tool_call>",
        prefix="\n",
        separator="\n</tool_call>\n<tool_call>\n",
        suffix="\n</tool_call>",
        hints=("<tool_call>",),
        prompt=CALLS_PROMPT,
    ),
    "llama3_json": ToolFormat(
        "",
        separator="; ",
        call=ObjectCall("parameters"),
        hints=("<|python_tag|>", '"parameters": dictionary of argument name'),
        optional_begin="<|python_tag|>",
    ),
    "json": ToolFormat("", prefix="[", separator=", ", suffix="]"),
}
assert tuple(FORMATS) == TOOL_FORMATS, "the configuration knows other names"


def find_tool_format(name: str | None, template: str) -> ToolFormat | None:
    """Return the configured format, or that of the chat template; None: it is not known."""
    if name is not None:
        return FORMATS[name]
    return next((one for one in FORMATS.values() if any(hint in template for hint in one.hints)), None)
