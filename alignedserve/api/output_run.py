"""Runs of an answer's text: content, thought, calls."""

from typing import NamedTuple

from alignedserve.api.tools.deltas import ToolCallDelta


class OutputRun(NamedTuple):
    """A run of an answer's text: content, thought, text of calls, or none of these."""

    length: int  # characters of the answer
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
