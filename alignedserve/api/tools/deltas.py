"""Tool calls as an answer gives them, in OpenAI's shapes."""

from typing import NamedTuple


class ToolCallDelta(NamedTuple):
    """A tool call that begins, or more of the arguments of one that has begun."""

    call_index: int  # of the call among those of its choice
    arguments: str = ""  # JSON text, to be appended to what came before
    call_id: str | None = None  # with the first delta of a call, as the name
    name: str | None = None


class OutputRun(NamedTuple):
    """A run of an answer's text: content, thought, text of calls, or none of these."""

    length: int  # characters of the answer
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
