"""The outermost layer: gives every request an id, authenticates it, and alone turns errors into answers."""

import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alignedserve.gateway.anthropic.errors import anthropic_error_response, is_anthropic
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.errors import (
    INTERNAL_ERROR,
    ClientDisconnected,
    error_response,
    http_error_of,
    rejection_code,
)
from alignedserve.gateway.metrics.gateway_metrics import GatewayMetrics

logger = logging.getLogger(__name__)

MakeErrorResponse = Callable[[Exception], Response]


class GatewayMiddleware:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, *, api_keys: ApiKeys, metrics: GatewayMetrics) -> None:
        self._app = app
        self._api_keys = api_keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; only cancellation propagates."""
        if scope["type"] != "http":
            return
        sender = _response_sender(scope, send)
        state = scope.setdefault("state", {})
        state["request_id"] = sender.request_id
        try:
            state["key_number"] = self._api_keys.authenticate(scope["path"], _presented_key(scope))
            await self._app(scope, receive, sender.send)
        except Exception as error:  # noqa: BLE001  (the gateway's single handler)
            self._log(sender.request_id, scope["path"], error)
            if not isinstance(error, ClientDisconnected):  # the server closes that connection
                await sender.send_error(error, scope, receive)

    def _log(self, request_id: str, path: str, error: Exception) -> None:
        """Log one line per failed request, with a traceback only for internal errors."""
        self._metrics.count_rejected(rejection_code(error))
        row = http_error_of(error)
        if row is INTERNAL_ERROR:
            logger.error("request %s failed: %s", request_id, type(error).__name__, exc_info=error)
        elif isinstance(error, ClientDisconnected):
            logger.info("request %s aborted: %s", request_id, error)
        else:
            # As a literal: the words may come from a chat template, and must not forge a line.
            logger.warning("request %s to %.80r failed with %d: %.300r", request_id, path, row.status, str(error))


class _ResponseSender:
    """Sends one response: adds headers to its start and knows how far it got."""

    def __init__(
        self, request_id: str, id_headers: Sequence[bytes], make_error_response: MakeErrorResponse, send: Send
    ) -> None:
        self.request_id = request_id
        self._headers = [(name, request_id.encode()) for name in id_headers] + [(b"x-content-type-options", b"nosniff")]
        self._make_error_response = make_error_response
        self._send = send
        self._has_started = False
        self._is_event_stream = False
        self._is_complete = False

    async def send(self, message: Message) -> None:
        """Send a message of the app."""
        if message["type"] == "http.response.start":
            self._has_started = True
            headers = [*message.get("headers", [])]
            self._is_event_stream = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
            message = {**message, "headers": headers + self._headers}
        elif not message.get("more_body", False):
            self._is_complete = True
        await self._send(message)

    async def send_error(self, error: Exception, scope: Scope, receive: Receive) -> None:
        """Send an error: as an HTTP response, or as the last event of a stream that has started."""
        if not self._has_started:
            await self._make_error_response(error)(scope, receive, self.send)
        elif not self._is_complete:
            last = scope["state"]["failure_events"](error) if self._is_event_stream else b""
            await self.send({"type": "http.response.body", "body": last, "more_body": False})


def _response_sender(scope: Scope, send: Send) -> _ResponseSender:
    request_id = secrets.token_hex(16)
    if is_anthropic(scope):
        respond = partial(anthropic_error_response, request_id=request_id)
        return _ResponseSender(request_id, (b"x-request-id", b"request-id"), respond, send)
    return _ResponseSender(request_id, (b"x-request-id",), error_response, send)


def _presented_key(scope: Scope) -> str | None:
    """Return the key after `Authorization: Bearer`, as OpenAI's clients send it, or of `x-api-key`, as Anthropic's."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")
