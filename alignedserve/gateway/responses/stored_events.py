"""Sends responses once they are stored, and the events of those in the background from their log."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from alignedserve.api.errors import NotFound, error_body
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.response_format import Formatter, MakeFormatter
from alignedserve.api.responses.formatter import ResponsesFormatter, encoded_event
from alignedserve.batches.responses.response_repository import EventLog
from alignedserve.core.errors import StoreUnavailable
from alignedserve.gateway.call import Call
from alignedserve.gateway.responses.responses_api import ResponsesApi, StoreLoss
from alignedserve.gateway.streaming import (
    BodyResponse,
    EventSender,
    EventStreamResponse,
    while_connected,
)

Keep = Callable[[bytes], Awaitable[None]]

_POLL_S = 0.2
_LAST_EVENTS = {"completed": "completed", "failed": "failed"}  # by status; of others: incomplete


class ResponseBody(BodyResponse):
    """A whole response."""

    def __init__(self, generation: Generation, make_formatter: MakeFormatter, keep: Keep) -> None:
        super().__init__(generation, make_formatter)
        self._keep = keep

    @override
    async def _body(self) -> bytes:
        body = await super()._body()
        await self._keep(body)
        return body


class ResponseEvents(EventStreamResponse):
    """A streamed response."""

    def __init__(self, generation: Generation, make_formatter: MakeFormatter, keep: Keep) -> None:
        super().__init__(generation, make_formatter)
        self._keep = keep

    @override
    async def _closing_events(self, formatter: Formatter) -> bytes:
        assert isinstance(formatter, ResponsesFormatter), "a formatter of another API"
        # They hold the whole answer, four times.
        events, response = await self._generation.written(
            lambda: (formatter.closing_events(), orjson.dumps(formatter.response))
        )
        await self._keep(response)
        return events


@dataclass(slots=True)
class StoredEvents:
    """The events of one response. `last` is the number of the one that was read last.

    `is_new`: it was submitted just now, and a client that is told that the store is away would submit it again.
    """

    api: ResponsesApi
    log: EventLog
    response_id: str
    starting_after: int = -1
    is_new: bool = False
    last: int = field(default=-1, init=False)
    _num_chunks: int = field(default=0, init=False)
    _has_gap: bool = field(default=False, init=False)  # chunks before the next one are not kept

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events as they come, until the response is over; and b"" once they are known to be there.

        Raises NotFound once the response is deleted, or events that the client lacks are not kept any more. A store
        that is lost once they have begun, or of a new response, is waited for.
        """
        loss, has_begun = StoreLoss(), self.is_new
        while True:
            try:
                # In this order: what was written before the response was over is read after that was seen.
                record = await self.api.retrieve(self.response_id)
                async for event in self._written():
                    has_begun = True
                    yield event
            except StoreUnavailable as error:
                if not has_begun:
                    raise
                await loss.wait(error)
                continue
            loss.is_over()
            if self._has_gap and record.batch_id is None:
                raise _not_kept()
            has_begun = True
            yield b""
            if record.batch_id is None:
                break
            await asyncio.sleep(_POLL_S)
        if self.last + 1 > self.starting_after:
            response = orjson.loads(bytes(record.response))
            name = _LAST_EVENTS.get(response["status"], "incomplete")
            yield encoded_event({"type": f"response.{name}", "response": response}, self.last + 1)

    async def _written(self) -> AsyncGenerator[bytes, None]:
        while chunks := await self.log.read(self.response_id, self._num_chunks):
            for chunk in chunks:
                self._num_chunks = chunk.number + 1
                self._has_gap |= chunk.events is None
                for block in (chunk.events or b"").split(b"\n\n")[:-1]:
                    if self._is_new(orjson.loads(block.partition(b"\ndata: ")[2])["sequence_number"]):
                        yield block + b"\n\n"

    def _is_new(self, number: int) -> bool:
        if self._has_gap and number > max(self.last, self.starting_after) + 1:
            raise _not_kept()
        self._has_gap = False
        self.last = number
        return number > self.starting_after

    def failure_events(self, error: Exception) -> bytes:
        """Return the last event of a stream that fails; the response goes on."""
        shown = orjson.loads(error_body(error))["error"]
        event = {"type": "error", "code": shown["code"], "message": shown["message"], "param": shown["param"]}
        return encoded_event(event, self.last + 1)


class StoredEventsResponse(Response):
    """A stream of stored events. The response goes on without its client."""

    def __init__(self, stored: StoredEvents) -> None:
        super().__init__()
        self._stored = stored

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call.of(scope)
        call.failure_events = self._stored.failure_events
        call.release_early()  # another gateway has the later events
        sender = EventSender(send, call)
        await while_connected(receive, self._send_all(sender), sender.check)

    async def _send_all(self, sender: EventSender) -> None:
        async with aclosing(self._stored.events()) as events:
            async for event in events:
                await sender.start()
                if event:
                    await sender.send_events(event)
        await sender.end(b"")


def _not_kept() -> NotFound:
    message = "Events that you lack are not kept any more; the response itself is. Read it without stream."
    return NotFound(message, param="starting_after", code="events_not_kept")
