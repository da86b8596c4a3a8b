"""Builds the items of a response and formats it. Plain dicts and orjson: this runs for every token.

Events of a response in the background, written to its log while it is generated.

The last event is not written: those who read the log make it once the response is stored (`stored_events`), so that
whoever has it can continue the response."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self

import orjson
from typing_extensions import override

from alignedserve.api.errors import error_body
from alignedserve.api.openai.choice_decoder import ChoiceDelta, OffsetLogprob
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.request_builder import GenerationRequest
from alignedserve.api.openai.response_format import chat_logprobs, extension_of
from alignedserve.api.responses.bodies import (
    CreateResponseRequest,
    TextFields,
    known_fields,
    offered_functions,
    tool_view,
)
from alignedserve.api.responses.items import Item, item_id
from alignedserve.api.tools.call_parser import ToolCallDelta
from alignedserve.batches.responses.response_repository import EventLimits, EventLog, EventWriter
from alignedserve.core.errors import StorageError
from alignedserve.core.request import FinishReason

Event = dict[str, Any]
ShowLogprobs = Callable[[Sequence[OffsetLogprob]], list[dict[str, Any]]]

_PART_KINDS = {"message": "output_text", "reasoning": "reasoning_text"}

_ECHOED = (
    *("background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls"),
    *("previous_response_id", "prompt_cache_key", "safety_identifier", "tool_choice", "truncation"),
    "user",
)


class OutputBuilder:
    """Keeps `items`, of which the last one may be open, and makes the events that tell of them.

    thought      output_item.added, content_part.added, reasoning_text.delta…, and the same backwards, done
    answer       output_item.added, content_part.added, output_text.delta…, and the same backwards, done
    call         output_item.added, function_call_arguments.delta…, .done, output_item.done"""

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
        for piece in delta.in_order:
            yield from self._add(piece)

    def _add(self, delta: ChoiceDelta) -> Iterator[Event]:
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

    def break_off(self) -> None:
        """Close the open item as it is, without events: the response has failed."""
        for _ in self._close("incomplete"):
            pass

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


def new_response(body: CreateResponseRequest, request: GenerationRequest, *, is_stored: bool) -> dict[str, Any]:
    """Return the response to a request before anything has been generated."""
    sampling = request.requests[0].sampling
    reasoning = body.reasoning
    return (
        {
            "id": request.response_id,
            "object": "response",
            "created_at": request.created,
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": request.model,
            "output": [],
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "service_tier": request.service_tier,
            "store": is_stored,
            "text": _text(body.text),
            "tools": [tool_view(tool) for tool in body.tools],
            "top_logprobs": body.top_logprobs or 0,
            "usage": None,
        }
        | {name: getattr(body, name) for name in _ECHOED}
        | {"temperature": sampling.temperature, "top_p": sampling.top_p}
        | _conversation(body)
    )


def _conversation(body: CreateResponseRequest) -> dict[str, Any]:
    return {} if body.conversation_id is None else {"conversation": {"id": body.conversation_id}}


def _text(body: TextFields | None) -> dict[str, Any]:
    text: dict[str, Any] = {"format": {"type": "text"}}
    if body is not None and body.format is not None:
        text["format"] = known_fields(body.format, with_unset=False)
    if body is not None and body.verbosity is not None:
        text["verbosity"] = body.verbosity
    return text


class ResponsesFormatter:
    """Formats the response to one generation. Implements Formatter."""

    def __init__(self, generation: Generation, *, body: CreateResponseRequest, is_stored: bool = False) -> None:
        request = generation.request
        self.response = new_response(body, request, is_stored=is_stored)  # as it is now
        self._generation = generation
        self._output = OutputBuilder(
            request.response_id,
            show_logprobs=lambda logprobs: chat_logprobs(logprobs, generation.tokenizer)["content"],
            function_names={function.chat_name: function.names for function in offered_functions(body.tools)},
        )
        self._num_events = 0
        self._finish_reason: FinishReason | None = None

    def events(self, index: int, delta: ChoiceDelta) -> bytes:
        """Return the events for what became visible; the first ones tell of the response itself."""
        begin = b"" if self._num_events else self._opening_events()
        self._finish_reason = delta.finish_reason or self._finish_reason
        return begin + self._numbered(self._output.add(delta))

    def closing_events(self) -> bytes:
        """Return the events that end the last item and the response, which those of a failure may still replace."""
        num_sent = self._num_events
        events = self._numbered(self._output.end(is_complete=not self._is_cut))
        self._end()
        events += self._numbered([self._response_event(self.response["status"])])
        self._num_events = num_sent
        return events

    def failure_events(self, error: Exception) -> bytes:
        """Return the event of a response that failed: it holds the items so far. One that failed before its first token
        begins all the same: clients take no other event for the first."""
        begin = b"" if self._num_events else self._opening_events()
        message = orjson.loads(error_body(error))["error"]["message"]
        failed = {"status": "failed", "error": {"code": "server_error", "message": message}}
        self._output.break_off()
        self.response |= failed | {"output": self._output.items}
        return begin + self._numbered([self._response_event("failed")])

    def body(self, choices: Sequence[Sequence[ChoiceDelta]]) -> bytes:
        """Return the whole response."""
        for delta in choices[0]:
            self._finish_reason = delta.finish_reason or self._finish_reason
            for _ in self._output.add(delta):
                pass
        for _ in self._output.end(is_complete=not self._is_cut):
            pass
        self._end()
        return orjson.dumps(self.response)

    @property
    def _is_cut(self) -> bool:
        return self._finish_reason is FinishReason.LENGTH

    def _opening_events(self) -> bytes:
        return self._numbered(self._response_event(name) for name in ("created", "in_progress"))

    def _end(self) -> None:
        self.response |= {"output": self._output.items, "usage": _usage(self._generation.usage())}
        if self._is_cut:
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self.response |= {"status": "completed", "completed_at": int(time.time())}
        self.response |= extension_of(self._generation)

    def _response_event(self, name: str) -> Event:
        return {"type": f"response.{name}", "response": self.response}

    def _numbered(self, events: Iterable[Event]) -> bytes:
        return b"".join(self._encoded(event) for event in events)

    def _encoded(self, event: Event) -> bytes:
        self._num_events += 1
        return encoded_event(event, self._num_events - 1)


def encoded_event(event: Event, number: int) -> bytes:
    payload = orjson.dumps(event | {"sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), payload)


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }


logger = logging.getLogger(__name__)

_FIRST_EVENTS = ("created", "queued")
_FIRST_LIFETIME_S = 25 * 3600.0  # longer than a response may wait
_LIFETIME_S = 3600.0
_FLUSH_S = 0.2


class BackgroundFormatter(ResponsesFormatter):
    """Formats a response in the background, whose first events its gateway has written."""

    def __init__(self, generation: Generation, *, body: CreateResponseRequest, response: dict[str, Any]) -> None:
        super().__init__(generation, body=body)
        self.response = response | {"status": "in_progress"}
        self._num_events = len(_FIRST_EVENTS)

    @override
    def events(self, index: int, delta: ChoiceDelta) -> bytes:
        is_first = self._num_events == len(_FIRST_EVENTS)
        begin = self._numbered([self._response_event("in_progress")]) if is_first else b""
        return begin + super().events(index, delta)

    @override
    def closing_events(self) -> bytes:
        events = self._numbered(self._output.end(is_complete=not self._is_cut))
        self._end()
        return events


async def write_first_events(log: EventLog, response: dict[str, Any], owner: str, limits: EventLimits) -> None:
    """Begin the log of a response that has been queued for this client."""
    events: list[Event] = [{"type": f"response.{name}", "response": response} for name in _FIRST_EVENTS]
    chunk = b"".join(encoded_event(event, number) for number, event in enumerate(events))
    await EventWriter(log, response["id"], owner, limits).write(chunk, now=time.time(), lifetime_s=_FIRST_LIFETIME_S)


async def generate_body(
    generation: Generation,
    make_formatter: Callable[[Generation], BackgroundFormatter],
    log: EventLog,
    owner: str,
    limits: EventLimits,
) -> bytes:
    """Generate and return the body of a response, writing its events meanwhile. Raises GenerationError."""
    formatter = make_formatter(generation)
    events = EventWriter(log, formatter.response["id"], owner, limits)
    async with generation, aclosing(generation.deltas()) as deltas, _ChunkWriter(events) as writer:
        async for index, delta in deltas:
            writer.add(formatter.events(index, delta))
        await writer.end(formatter.closing_events())
    return orjson.dumps(formatter.response)


class _ChunkWriter:
    """Writes events in chunks, at most so often, and those before a pause of the generation as well. It stops where an
    earlier attempt wrote before it, or the store is down."""

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self._pending = b""
        self._has_pending = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._has_begun = False
        self._has_stopped = False
        self._writing = asyncio.create_task(self._write_chunks())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writing.cancel()
        await asyncio.wait([self._writing])

    def add(self, events: bytes) -> None:
        if events and not self._has_stopped:
            self._pending += events
            self._has_pending.set()

    async def end(self, events: bytes) -> None:
        self.add(events)
        self._has_ended.set()
        self._has_pending.set()
        await self._writing

    async def _write_chunks(self) -> None:
        while not self._has_ended.is_set():
            await self._has_pending.wait()
            await self._write_pending()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), _FLUSH_S)
        await self._write_pending()

    async def _write_pending(self) -> None:
        chunk, self._pending = self._pending, b""
        self._has_pending.clear()
        if not chunk or self._has_stopped:
            return
        try:
            self._has_begun = self._has_begun or await self._writer.begin()
            is_written = self._has_begun and await self._writer.write(chunk, now=time.time(), lifetime_s=_LIFETIME_S)
        except StorageError as error:
            logger.warning("events of %s are not written any more: %s", self._writer.response_id, error)
            is_written = False
        self._has_stopped = not is_written
