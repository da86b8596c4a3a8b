"""The outermost layer: names every request, checks its key, and is the only place that turns errors into answers."""

import logging
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.errors import INTERNAL_ERROR, ClientGone, body_of, http_error_of, reason_of, response_of
from alignedserve.gateway.metrics.gateway_metrics import GatewayMetrics
from alignedserve.gateway.openai.response_format import event

logger = logging.getLogger(__name__)


class GatewayMiddleware:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, metrics: GatewayMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; nothing but cancellation gets out."""
        if scope["type"] != "http":
            return
        visit = _ResponseSender(secrets.token_hex(16), send)
        state = scope.setdefault("state", {})
        state["request_id"] = visit.request_id
        try:
            state["key_number"] = self._keys.identify(scope["path"], _authorization(scope))
            await self._app(scope, receive, visit.send)
        except Exception as error:  # noqa: BLE001  (the gateway's single handler)
            self._note(visit.request_id, scope["path"], error)
            if not isinstance(error, ClientGone):  # nobody would read it; the server closes the connection
                await visit.answer(error, scope, receive)

    def _note(self, request_id: str, path: str, error: Exception) -> None:
        """One line per failed request; the traceback only for faults of ours."""
        self._metrics.count_rejected(reason_of(error))
        row = http_error_of(error)
        if row is INTERNAL_ERROR:
            logger.error("request %s failed: %s", request_id, type(error).__name__, exc_info=error)
        elif isinstance(error, ClientGone):
            logger.info("request %s aborted: %s", request_id, error)
        else:
            # As a literal: the words may come from a chat template, and must not forge a line.
            logger.warning("request %s to %.80r failed with %d: %.300r", request_id, path, row.status, str(error))


class _ResponseSender:
    """One request's way out: adds headers to the start of the answer and knows how far it got."""

    def __init__(self, request_id: str, send: Send) -> None:
        self.request_id = request_id
        self._send = send
        self._has_started = False
        self._is_stream = False
        self._is_over = False

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self._has_started = True
            headers = [*message.get("headers", [])]
            self._is_stream = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
            headers += [(b"x-request-id", self.request_id.encode()), (b"x-content-type-options", b"nosniff")]
            message = {**message, "headers": headers}
        elif not message.get("more_body", False):
            self._is_over = True
        await self._send(message)

    async def answer(self, error: Exception, scope: Scope, receive: Receive) -> None:
        """Tell the client: as an HTTP answer, or as the last event of a stream that has begun."""
        if not self._has_started:
            await response_of(error)(scope, receive, self.send)
        elif not self._is_over:
            last = event(body_of(error)) if self._is_stream else b""
            await self.send({"type": "http.response.body", "body": last, "more_body": False})


def _authorization(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return str(value.decode("latin-1"))
    return None
