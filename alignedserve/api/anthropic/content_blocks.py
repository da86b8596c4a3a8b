"""Cuts the deltas of an answer into content blocks: one after the other, each started, extended and stopped."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from alignedserve.api.openai.choice_decoder import ChoiceDelta
from alignedserve.api.tools.deltas import ToolCallDelta

Event = dict[str, Any]

# The member of a block that each kind of delta extends.
_EXTENDED = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


class ContentBlocks:
    """Makes the events of content blocks. Thoughts that are not shown leave an empty block with their signature."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._open: str | int | None = None  # the kind of the open block, or the number of its call
        self._index = -1  # of the open or the last block
        self._thought = hashlib.blake2b(digest_size=16)

    def extend(self, delta: ChoiceDelta) -> Iterator[Event]:
        """Yield the events of what became visible."""
        if delta.reasoning:
            self._thought.update(delta.reasoning.encode())
            yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if self._shows_thinking:
                yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.text})
        for call in delta.tool_calls:
            yield from self._extend_call(call)

    def close(self) -> Iterator[Event]:
        """Yield the events that end the open block, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            # The signature tells which thought it was, also where it is not shown; it proves nothing.
            yield self._delta({"type": "signature_delta", "signature": self._thought.hexdigest()})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _extend_call(self, call: ToolCallDelta) -> Iterator[Event]:
        block: dict[str, Any] = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
        yield from self._switch(call.call_index, block)
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _switch(self, key: str | int, block: dict[str, Any]) -> Iterator[Event]:
        if self._open == key:
            return
        yield from self.close()
        self._open = key
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def collect_blocks(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the whole blocks that these events describe."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            name = _EXTENDED[event["delta"]["type"]]
            blocks[-1][name] = blocks[-1].get(name, "") + event["delta"][name]
    return [_with_input(block) for block in blocks]


def _with_input(block: dict[str, Any]) -> dict[str, Any]:
    """Return the block with its parsed input. One that the token limit cut short has none."""
    text = block.pop("partial_json", None)
    if text is None:
        return block
    try:
        return block | {"input": orjson.loads(text)}
    except orjson.JSONDecodeError:
        return block
