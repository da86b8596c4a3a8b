"""Sends responses, whole or as server-sent events (SSE), while watching the client: when it disconnects, the
generation is cancelled and its requests are aborted."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override

from alignedserve.api.errors import ClientDisconnected
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.response_format import BodyFormatter, Formatter, MakeFormatter, collect_body
from alignedserve.gateway.json_response import JsonResponse

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

# A client that does not read occupies capacity; after this it counts as disconnected.
_SEND_TIMEOUT_S = 60.0
_CHECK_PAUSE_S = 5.0

T = TypeVar("T")


class BodyResponse(Response):
    """A whole response. Errors are raised before anything is sent."""

    def __init__(self, generation: Generation, make_formatter: Callable[[Generation], BodyFormatter]) -> None:
        super().__init__()
        self._generation = generation
        self._make_formatter = make_formatter

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate, then send."""
        body = await while_connected(receive, self._body())
        await JsonResponse(body)(scope, receive, send)

    async def _body(self) -> bytes:
        return await collect_body(self._generation, self._make_formatter)


class EventStreamResponse(Response):
    """A streamed response. It starts with the first token, so that a refusal still is a proper HTTP error.

    Later errors are raised as well; the middleware ends the stream with the formatter's events of a failure.
    """

    def __init__(self, generation: Generation, make_formatter: MakeFormatter) -> None:
        super().__init__()
        self._generation = generation
        self._make_formatter = make_formatter

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate, sending each delta as it comes."""
        formatter = self._make_formatter(self._generation)
        scope["state"]["failure_events"] = formatter.failure_events
        sender = TimedSender(send)
        await while_connected(receive, self._stream(formatter, sender.send), sender.is_stuck)

    async def _stream(self, formatter: Formatter, send: Send) -> None:
        has_started = False
        async with self._generation as generation, aclosing(generation.deltas()) as deltas:
            async for index, delta in deltas:
                if not has_started:
                    has_started = True
                    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
                events = formatter.events(index, delta)
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            closing = await self._closing_events(formatter)
        await send({"type": "http.response.body", "body": closing, "more_body": False})

    async def _closing_events(self, formatter: Formatter) -> bytes:
        return formatter.closing_events()


class TimedSender:
    """Knows since when a send has been waiting for the client. Far cheaper than a timer per token."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None

    async def send(self, message: Message) -> None:
        """Send a message."""
        self._since_s = self._loop.time()
        await self._send(message)
        self._since_s = None

    def is_stuck(self) -> bool:
        """Return whether the client has not read for too long."""
        return self._since_s is not None and self._loop.time() - self._since_s > _SEND_TIMEOUT_S


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], is_stuck: Callable[[], bool] = lambda: False
) -> T:
    """Await `work`; when the client disconnects first, cancel it and raise ClientDisconnected.

    The request's body must have been read.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    both: set[asyncio.Task[Any]] = {task, watcher}
    try:
        while not (await asyncio.wait(both, timeout=_CHECK_PAUSE_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            if is_stuck():
                raise ClientDisconnected("The client does not read its answer.")
        if not task.done():
            raise ClientDisconnected("The client closed the connection.")
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
