"""The outermost layers: HEAD as GET; and a request's id, its key, and errors turned into answers, here alone."""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alignedserve.api.errors import ClientDisconnected, rejection_code
from alignedserve.api.work_lanes import note_client
from alignedserve.gateway.call import Call
from alignedserve.gateway.connections.host_names import check_names
from alignedserve.gateway.connections.limits import ArrivingBodies, ConnectionLimits, CountedBody
from alignedserve.gateway.json_response import anthropic_error_response, error_response
from alignedserve.gateway.logs import FailureLog, log_access
from alignedserve.gateway.services import Services
from alignedserve.keys.entry import ANYONE
from alignedserve.process.logs import about_request
from alignedserve.process.turn_threads import ClientTurns

_PER_TURN = 4  # to begin one takes from a third of a millisecond to one
# All who bring no key that is known have the turns of one client: keys are easily made up.
_UNKNOWN = ""


class PacedStarts:
    """The requests that wait for their turn, of one loop.

    Clients have turns, so nobody waits for a burst of another client. Of one client the oldest and the newest request
    begin by turns: a chat is not behind all documents that came before, and nothing waits for all that comes after.
    """

    def __init__(self) -> None:
        self._num_begun = 0  # in this turn
        self._waiting: ClientTurns[asyncio.Future[None]] = ClientTurns(from_both_ends=True)

    async def turn(self, client: str) -> None:
        """Return in the turn in which a request of this client may begin: in this one, unless many came with it."""
        loop = asyncio.get_running_loop()
        if self._num_begun >= _PER_TURN:
            begins = loop.create_future()
            self._waiting.append(client, begins)
            await begins
            return
        if not self._num_begun:
            loop.call_soon(self._next_turn)
        self._num_begun += 1

    def _next_turn(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < _PER_TURN:
            begins = self._waiting.take()
            if not begins.done():  # else its client has left
                begins.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._next_turn)


class GatewayMiddleware:
    """ASGI middleware around the whole app, the gateway's single handler of errors."""

    def __init__(self, app: ASGIApp, *, services: Services) -> None:
        self._app = app
        self._services = services
        config = services.config
        self._bodies = ArrivingBodies(ConnectionLimits.of(config).max_connections, config.max_body_bytes)
        self._failures = FailureLog()
        self._starts = PacedStarts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began_s = time.monotonic()
        call = Call(self._services, scope)
        if scope["method"] == "POST":  # others, such as probes of health, take little
            key = self._services.api_keys.known(_presented_key(call))
            await self._starts.turn(_UNKNOWN if key is None else call.client_of(key))
        with about_request(call.request_id), call.held:
            try:
                await self._serve(call, scope, receive, _ResponseSender(call, send))
            finally:
                if self._services.config.access_log:
                    log_access(call, time.monotonic() - began_s)
                del scope["state"]["call"]

    async def _serve(self, call: Call, scope: Scope, receive: Receive, sender: "_ResponseSender") -> None:
        keys = self._services.api_keys
        try:
            check_names(scope, self._services.config, is_open=keys.are_none)
            key = await keys.authenticate(scope["path"], _presented_key(call))
            call.known_key = key
            note_client(call.client_of(key))
            call.ticket = self._services.intake.admit(scope["method"])
            if call.ticket is not None:
                call.held.callback(call.ticket.release)
            if scope["method"] == "POST" and key is not ANYONE:
                call.body = CountedBody(self._bodies, key.owner, receive)
                call.held.callback(call.body.close)
                receive = call.body.receive
            await self._app(scope, receive, sender.send)
        except Exception as error:  # noqa: BLE001  (the gateway's single handler)
            self._services.metrics.count_rejected(rejection_code(error))
            self._failures.note(call.client_id or call.request_id, scope["path"], error)
            if not isinstance(error, ClientDisconnected):  # the server closes that connection
                await sender.send_error(error, scope, receive)


class _ResponseSender:
    def __init__(self, call: Call, send: Send) -> None:
        self._call = call
        self._send = send
        self._has_started = False
        self._is_event_stream = False
        self._is_complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_started = True
            self._call.status = message["status"]
            headers = [*message.get("headers", [])]
            self._is_event_stream = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
            message = {**message, "headers": headers + self._headers()}
        else:
            self._call.num_bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        call = self._call
        request_id = (call.client_id or call.request_id).encode()
        headers = [(b"x-request-id", request_id), (b"x-content-type-options", b"nosniff")]
        if call.is_anthropic:
            headers.append((b"request-id", call.request_id.encode()))
        ignored = call.ignored.as_header() if call.ignored is not None else None
        if ignored is not None:
            headers.append(ignored)
        if call.is_last:
            headers.append((b"connection", b"close"))
        return headers + call.limits.as_headers()

    async def send_error(self, error: Exception, scope: Scope, receive: Receive) -> None:
        """Send an error: as an HTTP response, or as the last event of a stream that has started.

        Any other body stays incomplete, upon which the server closes the connection: an end would make it look whole.
        """
        call = self._call
        if not self._has_started:
            response = anthropic_error_response(error, call.request_id) if call.is_anthropic else error_response(error)
            await response(scope, receive, self.send)
        elif self._is_event_stream and not self._is_complete:
            assert call.failure_events is not None, "a stream without events of a failure"
            await self.send({"type": "http.response.body", "body": call.failure_events(error), "more_body": False})


def _presented_key(call: Call) -> str | None:
    headers = call.http.headers
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


class HeadMiddleware:
    """Answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        has_ended = False

        async def send_head(message: Message) -> None:
            nonlocal has_ended
            if message["type"] != "http.response.body":
                await send(message)
            elif not has_ended:
                has_ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app({**scope, "method": "GET"}, receive, send_head)
