"""The outermost layers: HEAD as GET; and a request's id, its key, and errors turned into answers, here alone."""

import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alignedserve.api.errors import ClientDisconnected, rejection_code
from alignedserve.api.metrics.gateway_metrics import GatewayMetrics
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.timelines.timeline import plain_request_id
from alignedserve.api.work_lanes import note_client
from alignedserve.gateway.access_log import Answered, log_access
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.connections.arriving_bodies import ArrivingBodies, CountedBody
from alignedserve.gateway.connections.paced_starts import PacedStarts
from alignedserve.gateway.failure_log import FailureLog
from alignedserve.gateway.intake import Intake
from alignedserve.gateway.json_response import anthropic_error_response, error_response, is_anthropic
from alignedserve.gateway.shown_limits import ShownLimits
from alignedserve.keys.entry import ANYONE, KeyEntry
from alignedserve.process.logs import about_request

# What of a request's state leads back to its connection. In a cycle a request would stay until a garbage collection
# comes by: of 50 chats a second a hundred thousand objects, at which the gateway stopped for half a second.
_LEADS_BACK = ("streamed_body", "failure_events", "counted_body")

# All who bring no key that is known have the turns of one client: keys are easily made up.
_UNKNOWN = ""


class GatewayMiddleware:
    """ASGI middleware around the whole app."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: ApiKeys,
        metrics: GatewayMetrics,
        intake: Intake,
        bodies: ArrivingBodies,
        logs_access: bool = False,
    ) -> None:
        self._app = app
        self._logs_access = logs_access
        self._api_keys = api_keys
        self._metrics = metrics
        self._intake = intake
        self._bodies = bodies
        self._failures = FailureLog()
        self._starts = PacedStarts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        state = scope.setdefault("state", {})
        began_s = time.monotonic()
        if scope["method"] == "POST":  # others, such as probes of health, take little
            key = self._api_keys.known(_presented_key(scope))
            await self._starts.turn(_UNKNOWN if key is None else _client_of(key, scope))
        state["shown_limits"] = ShownLimits()
        state["request_id"] = request_id = secrets.token_hex(16)
        client_id = _client_request_id(scope)
        answered = state["answered"] = Answered(client_id)
        sender = _ResponseSender(client_id or request_id, scope, send, self._intake, answered)
        with about_request(request_id), ExitStack() as state["held_until_response"]:
            try:
                await self._serve(scope, receive, sender)
            finally:
                if self._logs_access:
                    log_access(scope, answered, time.monotonic() - began_s)
                for name in _LEADS_BACK:
                    state.pop(name, None)

    async def _serve(self, scope: Scope, receive: Receive, sender: "_ResponseSender") -> None:
        try:
            key = await self._api_keys.authenticate(scope["path"], _presented_key(scope))
            scope["state"]["key"] = key
            note_client(_client_of(key, scope))
            self._admit(scope)
            await self._app(scope, self._counted(key, scope, receive), sender.send)
        except Exception as error:  # noqa: BLE001  (the gateway's single handler)
            self._metrics.count_rejected(rejection_code(error))
            self._failures.note(sender.request_id, scope["path"], error)
            if not isinstance(error, ClientDisconnected):  # the server closes that connection
                await sender.send_error(error, scope, receive)

    def _counted(self, key: KeyEntry, scope: Scope, receive: Receive) -> Receive:
        if scope["method"] != "POST" or key is ANYONE:
            return receive
        body = scope["state"]["counted_body"] = CountedBody(self._bodies, key.owner, receive, scope["state"])
        scope["state"]["held_until_response"].callback(body.close)
        return body.receive

    def _admit(self, scope: Scope) -> None:
        state = scope["state"]
        state["ticket"] = ticket = self._intake.admit(scope["method"])
        if ticket is not None:
            state["held_until_response"].callback(ticket.release)


class _ResponseSender:
    def __init__(self, request_id: str, scope: Scope, send: Send, intake: Intake, answered: Answered) -> None:
        self.request_id = request_id
        self._answered = answered
        self._intake = intake
        self._state: Mapping[str, Any] = scope["state"]
        self._is_anthropic = is_anthropic(scope)
        self._send = send
        self._has_started = False
        self._is_event_stream = False
        self._is_complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_started = True
            self._answered.status = message["status"]
            headers = [*message.get("headers", [])]
            self._is_event_stream = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
            headers += [(b"x-request-id", self.request_id.encode()), (b"x-content-type-options", b"nosniff")]
            headers += self._own_request_id() + self._ignored_fields() + self._last_words()
            headers += self._state["shown_limits"].as_headers()
            message = {**message, "headers": headers}
        else:
            self._answered.num_bytes += len(message.get("body", b""))
            self._is_complete = not message.get("more_body", False)
        await self._send(message)

    def _own_request_id(self) -> list[tuple[bytes, bytes]]:
        return [(b"request-id", self._state["request_id"].encode())] if self._is_anthropic else []

    def _last_words(self) -> list[tuple[bytes, bytes]]:
        return [(b"connection", b"close")] if self._intake.is_closed or self._state.get("closes_connection") else []

    def _ignored_fields(self) -> list[tuple[bytes, bytes]]:
        ignored: IgnoredFields | None = self._state.get("ignored_fields")
        header = ignored.as_header() if ignored is not None else None
        return [] if header is None else [header]

    async def send_error(self, error: Exception, scope: Scope, receive: Receive) -> None:
        """Send an error: as an HTTP response, or as the last event of a stream that has started.

        Any other body stays incomplete, upon which the server closes the connection: an end would make it look whole.
        """
        if not self._has_started:
            await self._error_response(error)(scope, receive, self.send)
        elif self._is_event_stream and not self._is_complete:
            last = scope["state"]["failure_events"](error)
            await self.send({"type": "http.response.body", "body": last, "more_body": False})

    def _error_response(self, error: Exception) -> Response:
        if self._is_anthropic:
            return anthropic_error_response(error, request_id=self._state["request_id"])
        return error_response(error)


def _presented_key(scope: Scope) -> str | None:
    scheme, _, key = (_header(scope, b"authorization") or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else _header(scope, b"x-api-key")


def _client_of(key: KeyEntry, scope: Scope) -> str:
    return _address(scope) if key is ANYONE else key.owner


def _address(scope: Scope) -> str:
    return str(scope["client"][0]) if scope.get("client") else ""


def _header(scope: Scope, wanted: bytes) -> str | None:
    for name, value in scope["headers"]:
        if name == wanted:
            return str(value.decode("latin-1"))
    return None


def _client_request_id(scope: Scope) -> str | None:
    return plain_request_id(_header(scope, b"x-request-id"))


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
