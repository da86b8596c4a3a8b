"""The HTTP protocol of a connection: uvicorn's, which has no bounds of its own, within bounds.

A connection is refused while there are too many. Each request's head must come within a time and a size; its body may
not trickle, nor consist of anything but its bytes; what is left of a body that was refused is read for a while, so that
the client sees why. A client that has sent its last byte (a half-closed connection) is still answered; one that left
altogether is found out by a probe, which it refuses.
"""

import asyncio
from typing import Any

import httptools
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from alignedserve.api.errors import error_json
from alignedserve.gateway.connections.limits import ConnectionLimits, ConnectionPlace

_BODY_CHECK_S = 10.0
_LINGER_S = 5.0  # in which a client may read why its body was refused, while it still sends
_PROBE_S = 0.25
_MAX_PROBE_S = 4.0
_MAX_PIPELINED = 64
_MAX_OVERHEAD = 16  # bytes around each one of a body: chunks of one byte have 5
_FRAMING = (b"content-length", b"transfer-encoding")  # headers that say where a body ends
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # may come at any time before an answer, which it is not


class StreamedBody:
    """The body of a response in parts, written as uvicorn writes its chunks, without the way through every layer.

    A token is a part, and all that the layers do with it is to pass it on.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write(self, part: bytes) -> bool:
        """Write a part that is not empty; False: it was not, and is to be sent, as the client does not keep up."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete or cycle.transport.is_closing():
            return False
        if not (cycle.response_started and cycle.chunked_encoding):
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *, limits: ConnectionLimits, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self._place: ConnectionPlace | None = None  # None: the connection does not count
        self._answered: RequestResponseCycle | None = None  # others may wait behind it: `cycle` is the last one
        self._is_in_head = False
        self._is_in_body = False
        self._has_eof = False
        self._num_head_bytes = 0  # of heads or trailers that came whole
        self._num_body_bytes = 0
        self._num_overhead_bytes = 0
        self._num_checked_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        self._place = self._limits.admit(address)
        if self._place is not None:
            self._await_head()
        else:
            self._refuse(
                503, "The gateway has too many connections open.", "too_many_connections", b"retry-after: 1\r\n"
            )

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        if self._place is not None:
            self._place.leave()
            self._place = None
        answered, self._answered = self._answered, None
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        if self._place is None or self.transport.is_closing():
            return
        before, was_in_body = self._num_body_bytes, self._is_in_body
        self._parse(data)
        if self.transport.is_closing():
            return
        if self._is_in_head:
            self._num_head_bytes += len(data)
            self._check_head()
        elif was_in_body and self._is_in_body:
            self._num_overhead_bytes += len(data) - (self._num_body_bytes - before)
            self._check_overhead()
        elif self._timer is None and self._is_idle():  # such as empty lines, of which no request comes
            self._await_head()

    @override
    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open for writing: whoever has sent a whole request is answered."""
        if self._is_idle() or self._is_in_body or self.transport.is_closing():
            return False
        self._has_eof = True
        self._probe(_PROBE_S)
        return True

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data and not self.transport.is_closing():
                data = self._parse_to_upgrade(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _parse_to_upgrade(self, data: bytes) -> bytes:
        """Parse to behind the next head that asks for another protocol, at which the parser stops; return what is left.

        A body that it announces is left behind a head of our own: it is not another request.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head = b"POST / HTTP/1.1\r\n%b\r\n" % self._framing() if self._is_in_body else b""
            return head + data[upgrade.args[0] :]
        return b""

    def _framing(self) -> bytes:
        return b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING)

    # --- callbacks of the parser

    @override
    def on_message_begin(self) -> None:
        if self._is_in_body:  # of our own head
            return
        super().on_message_begin()
        self.scope["state"]["connection"] = self._place  # for whoever reads of which class the request is
        self._is_in_head, self._num_head_bytes = True, 0
        if self._timer is None:
            self._await_head()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        if self._is_in_body:  # of our own head
            return
        self._set_timer(None)
        self._is_in_head = False
        self._num_head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if not self._check_head():
            return
        if len(self.pipeline) >= _MAX_PIPELINED:
            self.transport.close()
            return
        super().on_headers_complete()  # raises where it cannot read the target: then there is no cycle to answer in
        if not self.pipeline:
            self._answered = self.cycle
        self._is_in_body = True
        self._num_body_bytes = self._num_overhead_bytes = self._num_checked_bytes = 0
        if self.scope["method"] != "HEAD":
            self.scope["state"]["streamed_body"] = StreamedBody(self.cycle)
        self._set_timer(self.loop.call_later(_BODY_CHECK_S, self._check_rate))

    @override
    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if not self.transport.is_closing():
            super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing():  # its body is yet to be read
            return
        self._is_in_body = False
        self._set_timer(None)
        if not self.transport.is_closing():
            super().on_message_complete()

    # --- callbacks of the request being answered

    @override
    def on_response_complete(self) -> None:
        self._answered = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self._has_eof and self._is_idle():
            self.transport.close()
        elif self._is_in_body and self.cycle.response_complete and not self.transport.is_closing():
            self._set_timer(self.loop.call_later(_LINGER_S, self.transport.close))

    # --- bounds

    def _is_idle(self) -> bool:
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def _await_head(self) -> None:
        self._set_timer(self.loop.call_later(self._limits.header_timeout_s, self._end_slow_head))

    def _end_slow_head(self) -> None:
        if self._is_in_head and self._is_idle():
            self._refuse(408, "The headers did not arrive in time.", "headers_too_slow")
        else:
            self.transport.close()

    def _check_head(self) -> bool:
        limit = self._limits.max_header_bytes
        if self._num_head_bytes <= limit:
            return True
        self._refuse(431, f"The headers are larger than {limit} bytes.", "headers_too_large")
        return False

    def _check_overhead(self) -> None:
        limit = self._limits.max_header_bytes + _MAX_OVERHEAD * self._num_body_bytes
        if self._num_overhead_bytes > limit:
            self._refuse(400, "The body is not valid.", "invalid_body")

    def _check_rate(self) -> None:
        came, self._num_checked_bytes = self._num_body_bytes - self._num_checked_bytes, self._num_body_bytes
        is_awaited = not self.flow.read_paused and not self.cycle.waiting_for_100_continue
        if is_awaited and came < self._limits.min_body_bytes_per_s * _BODY_CHECK_S:
            self._refuse(408, "The body did not arrive in time.", "body_too_slow")
        else:
            self._set_timer(self.loop.call_later(_BODY_CHECK_S, self._check_rate))

    def _probe(self, pause_s: float) -> None:
        answered = self._answered
        if self.transport.is_closing() or answered is None:
            return
        if not answered.response_started and answered.scope["http_version"] == "1.1":
            self.transport.write(_CONTINUE)
        self._set_timer(self.loop.call_later(pause_s, self._probe, min(2 * pause_s, _MAX_PROBE_S)))

    def _refuse(self, status: int, message: str, code: str, headers: bytes = b"") -> None:
        self._set_timer(None)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = error_json(message, kind, code=code)
        is_in_turn = self._is_in_body and not self.pipeline and not self.cycle.response_started
        if self._is_idle() or is_in_turn:
            length = b"content-length: %d\r\n" % len(body)
            fixed = b"content-type: application/json\r\nconnection: close\r\n"
            self.transport.write(STATUS_LINE[status] + fixed + length + headers + b"\r\n" + body)
        self.transport.close()

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    @override
    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(400, msg, "invalid_http")
