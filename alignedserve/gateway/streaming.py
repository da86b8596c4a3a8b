"""Sends responses, whole or as server-sent events (SSE), while watching the client: when it disconnects, the
generation is cancelled and its requests are aborted."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override

from alignedserve.api.anthropic.message_format import anthropic_error_body
from alignedserve.api.errors import ClientDisconnected, error_body
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.response_format import BodyFormatter, Formatter, MakeFormatter, collect_body
from alignedserve.gateway.call import Call, NamesModel
from alignedserve.gateway.json_response import JsonResponse

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

# A client counts as disconnected after reading nothing for this time.
_SEND_TIMEOUT_S = 60.0
_CHECK_PAUSE_S = 5.0
# A stream that says nothing for this long gets a comment, which clients pass over: proxies cut silent connections.
_COMMENT_AFTER_S = 15.0
_COMMENT = b": waiting\n\n"

T = TypeVar("T")


class BodyResponse(Response):
    """A whole response. Errors are raised before anything is sent."""

    def __init__(self, generation: Generation, make_formatter: Callable[[Generation], BodyFormatter]) -> None:
        super().__init__()
        self._generation = generation
        self._make_formatter = make_formatter

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        Call.of(scope).generation = self._generation
        body = await while_connected(receive, self._body())
        await JsonResponse(body)(scope, receive, send)

    async def _body(self) -> bytes:
        return await collect_body(self._generation, self._make_formatter)


class EventStreamResponse(Response):
    """A streamed response. It starts with the first token, so that a refusal still is a proper HTTP error; or after
    15 s of waiting, with a comment.

    Later errors are raised as well; the middleware ends the stream with the formatter's events of a failure.
    """

    def __init__(self, generation: Generation, make_formatter: MakeFormatter) -> None:
        super().__init__()
        self._generation = generation
        self._make_formatter = make_formatter

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, formatter = Call.of(scope), self._make_formatter(self._generation)
        call.generation, call.failure_events = self._generation, formatter.failure_events
        sender = EventSender(send, call)
        await while_connected(receive, self._stream(formatter, sender), sender.check)

    async def _stream(self, formatter: Formatter, sender: "EventSender") -> None:
        async with self._generation as generation:
            await GenerationWriter(generation, formatter, sender).write_all()
            closing = await self._closing_events(formatter)
        await sender.end(closing)

    async def _closing_events(self, formatter: Formatter) -> bytes:
        return formatter.closing_events()


class AwaitedResponse(Response):
    """A response that is made once its model is loaded.

    A stream begins after 15 s of waiting, with a comment. A later error ends the stream.
    """

    def __init__(
        self,
        loading: Callable[[], Coroutine[Any, Any, object]],
        make: Callable[[], Awaitable[Response]],
        *,
        is_streamed: bool,
    ) -> None:
        super().__init__()
        self._loading = loading
        self._make = make
        self._is_streamed = is_streamed

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call.of(scope)
        call.failure_events = partial(failure_event, is_anthropic=call.is_anthropic, request_id=call.request_id)
        sender = EventSender(send, call)
        await while_connected(receive, self._loading(), sender.check if self._is_streamed else None)
        response = await self._make()

        async def send_rest(message: Message) -> None:
            if message["type"] != "http.response.start" or not sender.has_started:
                await send(message)

        await response(scope, receive, send_rest)


async def answered_awake(
    call: Call, body: NamesModel, answer: Callable[[], Awaitable[Response]], *, is_streamed: bool
) -> Response:
    """Return what `answer` does; if the model sleeps, a response that calls it once the model is loaded."""
    loading = await call.loading(body)
    return await answer() if loading is None else AwaitedResponse(loading, answer, is_streamed=is_streamed)


async def awake_model(call: Call, body: NamesModel) -> ModelServices:
    """Return the model of a body, loaded and held until the response has ended. Raises also Overloaded."""
    loading = await call.loading(body)
    if loading is not None:
        await while_connected(call.http.receive, loading())
    return call.model(body.model)


def failure_event(error: Exception, *, is_anthropic: bool, request_id: str) -> bytes:
    """Return the last event of a stream that fails."""
    if is_anthropic:
        return b"event: error\ndata: %b\n\n" % anthropic_error_body(error, request_id=request_id)
    return b"data: %b\n\n" % error_body(error)


class TimedSender:
    """Knows since when a send has been waiting for the client. Far cheaper than a timer per token."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None

    async def send(self, message: Message) -> None:
        self._since_s = self._loop.time()
        await self._send(message)
        self._since_s = None

    async def check(self) -> None:
        """Raise ClientDisconnected if the client has not read for too long. Called every five seconds."""
        if self._since_s is not None and self._loop.time() - self._since_s > _SEND_TIMEOUT_S:
            raise ClientDisconnected("The client does not read its answer.")


class EventSender(TimedSender):
    """Sends the events of a stream, and comments while there are none."""

    def __init__(self, send: Send, call: Call) -> None:
        super().__init__(send)
        self.has_started = False  # headers were sent
        self._call = call
        self._body = call.streamed_body
        self._last_s = self._loop.time()

    async def start(self) -> None:
        if not self.has_started:
            self.has_started = True
            await self.send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})

    def write_events(self, events: bytes) -> bool:
        """Write events at once, which a stream that has begun to a client that keeps up allows; False: send them."""
        if not (events and self.has_started and self._body is not None and self._body.write(events)):
            return False
        self._last_s = self._loop.time()
        self._call.num_bytes += len(events)
        return True

    async def send_events(self, events: bytes) -> None:
        self._last_s = self._loop.time()
        await self.send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        await self.start()
        await self.send({"type": "http.response.body", "body": events, "more_body": False})

    @override
    async def check(self) -> None:
        await super().check()
        if self._since_s is None and self._loop.time() - self._last_s >= _COMMENT_AFTER_S:
            try:
                async with asyncio.timeout(_SEND_TIMEOUT_S):  # nobody looks for a stuck client while this one waits
                    await self.start()
                    await self.send_events(_COMMENT)
            except TimeoutError as error:
                raise ClientDisconnected("The client does not read its answer.") from error


class GenerationWriter:
    """Writes the events of a generation in the turn of the loop in which their tokens come.

    Its task is woken only for what the connection does not take at once: the first events, those for a client that does
    not keep up, and the end.
    """

    def __init__(self, generation: Generation, formatter: Formatter, sender: EventSender) -> None:
        self._generation = generation
        self._formatter = formatter
        self._sender = sender
        self._unwritten: asyncio.Future[bytes] | None = None  # None: the task does not wait for any
        self._failure: Exception | None = None  # to be raised once what came before it is sent

    async def write_all(self) -> None:
        self._generation.call_when_ready(self._write_new)
        while not self._generation.is_complete:
            events = await self._next_unwritten()
            await self._sender.start()
            if events:
                await self._sender.send_events(events)
            if self._failure is not None:
                raise self._failure

    async def _next_unwritten(self) -> bytes:
        self._unwritten = asyncio.get_running_loop().create_future()
        self._write_new()
        try:
            return await self._unwritten
        finally:
            self._unwritten = None

    def _write_new(self) -> None:
        unwritten = self._unwritten
        if unwritten is None or unwritten.done():
            return
        parts: list[bytes] = []
        try:
            for index, delta in self._generation.read_new():
                parts.append(self._formatter.events(index, delta))
        except Exception as error:  # noqa: BLE001  (the task raises it)
            events = b"".join(parts)
            if not events or self._sender.write_events(events):
                unwritten.set_exception(error)
            else:
                self._failure = error
                unwritten.set_result(events)
            return
        events = b"".join(parts)
        is_written = self._sender.has_started and (not events or self._sender.write_events(events))
        if self._generation.is_complete or (parts and not is_written):
            unwritten.set_result(b"" if is_written else events)


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], check: Callable[[], Awaitable[None]] | None = None
) -> T:
    """Await `work`; when the client disconnects first, cancel it and raise ClientDisconnected.

    The request's body must have been read. `check`: called while it waits, first at a random moment, as thousands of
    streams may begin together; its errors end the wait.
    """
    pause_s = _CHECK_PAUSE_S * random.random()  # noqa: S311  (no secret)
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    both: set[asyncio.Task[Any]] = {task, watcher}
    try:
        while not (await asyncio.wait(both, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            pause_s = _CHECK_PAUSE_S
            if check is not None:
                await check()
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
