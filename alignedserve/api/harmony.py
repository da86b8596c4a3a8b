"""Harmony, the form of gpt-oss: an answer is messages, each in a channel.

Each is `<|channel|>CHANNEL<|message|>TEXT`, with `<|end|><|start|>assistant` between two of them. Thoughts are in the
channel `analysis`, the answer in `final`, what is said to the user before a call in `commentary`. A call is a message
whose header names a recipient, `to=functions.NAME`; it ends the answer.

Here a conversation is made one that gpt-oss's template shows whole, an answer's text is divided, and a grammar holds an
answer to its tools, its constraint and the budget of its thoughts."""

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from alignedserve.api.reasoning import ReasoningFormat, lazy, thought_rules
from alignedserve.api.text_markers import MarkerFinder, overlap_len
from alignedserve.api.tools.call_parser import OutputRun, ToolCallDelta
from alignedserve.api.tools.formats import CallableTool
from alignedserve.runtime.grammar.constraints import json_value, quoted

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
ASSISTANT = "assistant"
FUNCTIONS = "functions."  # before a function's name

LEVELS = ("low", "medium", "high")  # of effort


_BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
_BEGINNINGS = (*MARKS, ASSISTANT, "to=")  # of a header
_MAX_HEADER_LEN = 512  # characters; what is longer is none
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*([a-z]*)")
_SEPARATOR = "\n\n"  # between two messages to the user, or two thoughts


class _Kind(enum.Enum):
    THOUGHT = "thought"
    CONTENT = "content"
    CALL = "call"


class HarmonyParser:
    """Divides the text of one answer. The lengths of all runs together are the length of the text. What comes without a
    header is content, so that nothing is lost of a model that does not keep to its form."""

    def __init__(
        self, marked: Callable[[str], str], new_id: Callable[[], str], *, has_tools: bool, is_continued: bool = False
    ) -> None:
        """Make a parser. `marked`: writes control tokens as the answer's text has them.

        `has_tools`: messages to functions are calls, not content. `is_continued`: the prompt ends inside of a message
        to the user."""
        self.has_calls = False
        self._marked = {marked(mark): mark for mark in MARKS}
        self._beginnings = [marked(beginning) for beginning in _BEGINNINGS]
        self._message = marked(MESSAGE)
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
        return self._header is None and self._kind is _Kind.THOUGHT

    def push(self, text: str) -> list[OutputRun]:
        runs: list[OutputRun] = []
        while text:
            text = self._read_header(text, runs) if self._header is not None else self._read_body(text, runs)
        return runs

    def end(self) -> list[OutputRun]:
        held, self._header = self._header, None
        if held is None:
            return self._runs(self._body.flush())
        if not self._is_header(held) or self._plain(held).strip().startswith(MARKS):
            return [OutputRun(len(held))]
        self._kind = _Kind.CONTENT
        return self._runs(held)

    def _read_header(self, text: str, runs: list[OutputRun]) -> str:
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
        stripped = text.lstrip()
        if len(text) - overlap_len(text, self._message) > _MAX_HEADER_LEN:
            return False
        if not stripped or any(stripped.startswith(beginning) for beginning in self._beginnings):
            return True
        return not is_whole and any(beginning.startswith(stripped) for beginning in self._beginnings)

    def _plain(self, text: str) -> str:
        for written, mark in self._marked.items():
            text = text.replace(written, mark)
        return text

    def _begin(self, header: str, runs: list[OutputRun]) -> None:
        self._header = None
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        if recipient is not None and self._has_tools and recipient[1] != ASSISTANT:
            self._kind, self.has_calls = _Kind.CALL, True
            name = recipient[1].removeprefix(FUNCTIONS)
            call = ToolCallDelta(self._num_calls, call_id=self._new_id(), name=name)
            self._num_calls += 1
            runs.append(OutputRun(0, tool_calls=(call,)))
            return
        is_thought = channel is not None and channel[1] == ANALYSIS
        self._kind = _Kind.THOUGHT if is_thought else _Kind.CONTENT
        if self._has_text[self._kind]:
            runs.append(OutputRun(0, reasoning=_SEPARATOR) if is_thought else OutputRun(0, _SEPARATOR))

    def _read_body(self, text: str, runs: list[OutputRun]) -> str:
        before, mark, after = self._body.push(text)
        runs += self._runs(before)
        if mark is None:
            return ""
        if self._marked[mark] in (START, CHANNEL):
            self._header = ""  # it belongs to the next message's header
            return mark + after
        runs.append(OutputRun(len(mark)))
        self._header = ""
        return after

    def _runs(self, text: str) -> list[OutputRun]:
        if not text:
            return []
        if self._kind is _Kind.CALL:
            return [OutputRun(len(text), tool_calls=(ToolCallDelta(self._num_calls - 1, text),))]
        self._has_text[self._kind] = True
        return [OutputRun(len(text), reasoning=text) if self._kind is _Kind.THOUGHT else OutputRun(len(text), text)]


Message = Mapping[str, Any]
_NEAREST_LEVELS = {"minimal": "low", "xhigh": "high", "max": "high"}


def harmony_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with one system message, and an assistant's calls apart, each with its result behind it. The
    template takes thoughts as `thinking`, shows the first call of a message alone, names a result by the call right
    before it, and reads a system message at the beginning only; descriptions of tools it takes for granted."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    shown: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            shown += _assistant_messages(message, messages[index + 1 :])
        elif message["role"] == "user":
            shown.append(dict(message))
    return shown


def harmony_tools(tools: Sequence[Message]) -> list[dict[str, Any]]:
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def harmony_effort(effort: str) -> str | None:
    """Return the level of an effort; None: the model cannot do without thoughts."""
    return effort if effort in LEVELS else _NEAREST_LEVELS.get(effort)


def _assistant_messages(message: Message, following: Sequence[Message]) -> list[dict[str, Any]]:
    first = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}
    thought = message.get("reasoning_content", "")
    calls = message.get("tool_calls", ())
    if calls and message["content"] and thought:
        first["content"] = ""
        thought = f"{thought}\n\n{message['content']}"  # beside a call there is a place for only one
    if thought:
        first["thinking"] = thought
    if not calls:
        return [first]
    results = {
        result["tool_call_id"]: dict(result) for result in takewhile(lambda result: result["role"] == "tool", following)
    }
    shown: list[dict[str, Any]] = []
    for call in calls:
        calling = first if not shown else {"role": message["role"], "content": ""}
        shown += [{**calling, "tool_calls": [call]}, results[call["id"]]]
    return shown


_THOUGHT = ReasoningFormat(CHANNEL + ANALYSIS + MESSAGE, END)
_PREAMBLE = CHANNEL + COMMENTARY + MESSAGE
_TEXT = "TEXT: /(?s:.*)/"
_CALL_HEADERS = (  # in answers, and in the chat template
    (f"{CHANNEL}{COMMENTARY} to={FUNCTIONS}", f" {CONSTRAIN}json{MESSAGE}"),
    (f" to={FUNCTIONS}", f"{CHANNEL}{COMMENTARY} json{MESSAGE}"),
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
        final = f"{literal(CHANNEL)} {quoted(FINAL)} {literal(MESSAGE)} {text}"
        lasts = [*([] if self.must_call else ["final"]), *(["call"] if self.tools else [])]
        rules = [
            _TEXT,
            f"start: {self._before()} ({' | '.join(lasts)})",
            f"final: {final}",
            f"turn: {literal(START)} {quoted(ASSISTANT)}",
            "analysis: open thought turn",
            thought_rules(_THOUGHT, literal, self.budget),
        ]
        return "\n".join([*rules, *(self._tool_rules(literal, call_end) if self.tools else [])])

    def _before(self) -> str:
        has_preambles = bool(self.tools) and not self.has_content_part
        if self.budget is not None:
            return "analysis? preamble*" if has_preambles else "analysis?"
        return "(analysis | preamble)*" if has_preambles else "analysis*"

    def _tool_rules(self, literal: Callable[[str], str], call_end: str) -> list[str]:
        end = literal(END)
        rules = [f"preamble: {literal(_PREAMBLE)} said turn", f"said{lazy(end)}: TEXT {end}"]
        options = []
        for index, tool in enumerate(self.tools):
            rules.append(f"arguments_{index}: {json_value(tool.arguments)}")
            headers = [literal(before + tool.name + after) for before, after in _CALL_HEADERS]
            options.append(f"({' | '.join(headers)}) arguments_{index} {literal(call_end)}")
        return [*rules, f"call: {' | '.join(options)}"]
