"""Events of a response in the background, written to its log while it is generated.

The last event is not written: those who read the log make it once the response is stored (`stored_events`), so that
whoever has it can continue the response.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Self

import orjson
from typing_extensions import override

from alignedserve.api.openai.choice_decoder import ChoiceDelta
from alignedserve.api.openai.generation import Generation
from alignedserve.api.responses.bodies import CreateResponseRequest
from alignedserve.api.responses.formatter import Event, ResponsesFormatter, encoded_event
from alignedserve.batches.responses.response_repository import EventLimits, EventLog, EventWriter
from alignedserve.core.errors import StorageError

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
    """Writes events in chunks, at most so often, and those before a pause of the generation as well.

    It stops where an earlier attempt wrote before it, or the store is down.
    """

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
