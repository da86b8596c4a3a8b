"""Builds the items of a response and the events that tell of them, from what becomes visible of its one choice.

thought      output_item.added, content_part.added, reasoning_text.delta…, and the same backwards, done
answer       output_item.added, content_part.added, output_text.delta…, and the same backwards, done
call         output_item.added, function_call_arguments.delta…, .done, output_item.done
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from alignedserve.api.openai.choice_decoder import ChoiceDelta, OffsetLogprob
from alignedserve.api.responses.items import Item, item_id
from alignedserve.api.tools.deltas import ToolCallDelta

Event = dict[str, Any]
ShowLogprobs = Callable[[Sequence[OffsetLogprob]], list[dict[str, Any]]]

_PART_KINDS = {"message": "output_text", "reasoning": "reasoning_text"}


class OutputBuilder:
    """Keeps `items`, of which the last one may be open."""

    def __init__(
        self, response_id: str, *, show_logprobs: ShowLogprobs, function_names: Mapping[str, dict[str, str]]
    ) -> None:
        """`function_names`: of functions by their name in the prompt, as items have them."""
        self.items: list[Item] = []
        self._response_id = response_id
        self._show_logprobs = show_logprobs
        self._function_names = function_names
        self._open: str | None = None  # type of the open item
        self._call_index: int | None = None  # of the open call
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._logprobs: list[dict[str, Any]] = []

    def add(self, delta: ChoiceDelta) -> Iterator[Event]:
        """Add what became visible, and yield its events."""
        if delta.reasoning:
            yield from self._open_text("reasoning")
            yield self._text_event("delta", delta=self._added(delta.reasoning))
        if delta.text or delta.logprobs:
            yield from self._open_text("message")
            logprobs = self._show_logprobs(delta.logprobs)
            self._logprobs += logprobs
            yield self._text_event("delta", delta=self._added(delta.text), logprobs=logprobs)
        for call in delta.tool_calls:
            yield from self._open_call(call)
            if call.arguments:
                arguments = self._added(call.arguments)
                yield self._event("function_call_arguments.delta", item_id=self.items[-1]["id"], delta=arguments)

    def end(self, *, is_complete: bool) -> Iterator[Event]:
        """Close the open item. A response has at least one item: an empty answer where nothing came."""
        if not self.items:
            yield from self._open_text("message")
        yield from self._close("completed" if is_complete else "incomplete")

    def _open_text(self, kind: str) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self._close("completed")
        members: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield self._begin(kind, {"type": kind, "content": []} | members)
        yield self._part_event("added", self._part())

    def _open_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if self._open == "function_call" and self._call_index == call.call_index:
            return
        yield from self._close("completed")
        self._call_index = call.call_index
        assert call.name is not None, "a call that begins without its name"
        names = self._function_names.get(call.name, {"name": call.name})
        item = {"type": "function_call", "call_id": call.call_id, **names, "arguments": ""}
        yield self._begin("function_call", item)

    def _begin(self, kind: str, item: Item) -> Event:
        self._open, self._pieces, self._logprobs = kind, [], []
        item_with_id = {"id": item_id(kind, self._response_id, len(self.items)), **item, "status": "in_progress"}
        self.items.append(item_with_id)
        return self._event("output_item.added", item=dict(item_with_id))

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item = self.items[-1]
        if self._open == "function_call":
            item["arguments"] = arguments = "".join(self._pieces)
            names = {"item_id": item["id"], "name": item["name"]}
            yield self._event("function_call_arguments.done", **names, arguments=arguments)
        else:
            part = self._part()
            item["content"] = [part]
            logprobs = {"logprobs": self._logprobs} if self._open == "message" else {}
            yield self._text_event("done", text=part["text"], **logprobs)
            yield self._part_event("done", part)
        item["status"] = status
        self._open = None
        yield self._event("output_item.done", item=item)

    def _added(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece

    def _part(self) -> dict[str, Any]:
        """Return the open item's part as it is now."""
        assert self._open is not None, "a part of no item"
        part = {"type": _PART_KINDS[self._open], "text": "".join(self._pieces)}
        return part | ({"annotations": [], "logprobs": self._logprobs} if self._open == "message" else {})

    def _part_event(self, suffix: str, part: dict[str, Any]) -> Event:
        return self._event(f"content_part.{suffix}", item_id=self.items[-1]["id"], content_index=0, part=part)

    def _text_event(self, suffix: str, **members: Any) -> Event:
        assert self._open is not None, "text of no item"
        name = f"{_PART_KINDS[self._open]}.{suffix}"
        return self._event(name, item_id=self.items[-1]["id"], content_index=0, **members)

    def _event(self, name: str, /, **members: Any) -> Event:
        return {"type": f"response.{name}", "output_index": len(self.items) - 1, **members}
