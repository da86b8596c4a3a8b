"""Sends traces to a collector, OTLP over HTTP, from a thread of its own.

The event loop only puts a call that has ended into a bounded queue: a collector that is dead, slow or hanging costs
spans, which are counted, and no token any time.
"""

import http.client
import logging
import math
import queue
import ssl
import threading
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from alignedserve.api.timelines.phases import end_of, num_spans
from alignedserve.api.timelines.timeline import LAST_NOTES_S, Timeline
from alignedserve.config.sections import TracingConfig

logger = logging.getLogger(__name__)

_BATCH = 128  # calls in one message at most
_GATHER_S = 0.5  # in which others may come along
_MAX_TRIES = 4
_FIRST_PAUSE_S = 0.5  # doubled with each try
_RETRIED = frozenset({429, 502, 503, 504})  # as OTLP says
_TRACES_PATH = "/v1/traces"
_MAX_ANSWER_BYTES = 64 * 1024
_WARN_EVERY_S = 60.0


class TraceExporter:
    """Takes traced calls at their ends. `close` ends its thread, which then sends what it can within a moment."""

    def __init__(self, config: TracingConfig, gateway: str, headers: Mapping[str, str] | None = None) -> None:
        """`headers`: what the collector wants beside the message. Starts no thread before the first call ends."""
        assert config.endpoint is not None, "an exporter without a collector"
        self._collector = _Collector(config.endpoint, config.timeout_s, headers or {})
        self._names = config.service_name, gateway
        self._queue: queue.Queue[Timeline] = queue.Queue(config.max_queued_requests)
        self._first: Timeline | None = None  # of those that left the queue; its last notes may be on their way
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned_s = -_WARN_EVERY_S
        self.num_exported = 0  # spans, like the next
        self.num_dropped = 0

    def add(self, timeline: Timeline) -> None:
        """Send a call's spans some time; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(timeline)
        except queue.Full:
            self.num_dropped += num_spans(timeline)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits, for so long at most. May be repeated."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        # Here, as OTLP's types take a tenth of a second to load, which a gateway without traces need not spend.
        from alignedserve.api.timelines.spans import Origin, export_of

        origin = Origin(*self._names)
        while not (self._closing.is_set() and self._first is None and self._queue.empty()):
            timelines = self._gather()
            if timelines:
                message, count = export_of(timelines, origin)
                self._export(message.SerializeToString(), count)
        self._collector.close()

    def _gather(self) -> list[Timeline]:
        """Return the calls that ended before the last notes' time; none when there are none."""
        timelines: list[Timeline] = []
        self._closing.wait(_GATHER_S)
        until_s = math.inf if self._closing.is_set() else time.monotonic() - LAST_NOTES_S
        while len(timelines) < _BATCH and (timeline := self._next()) is not None:
            if end_of(timeline) > until_s:
                self._first = timeline
                break
            timelines.append(timeline)
        return timelines

    def _next(self) -> Timeline | None:
        first, self._first = self._first, None
        try:
            return self._queue.get_nowait() if first is None else first
        except queue.Empty:
            return None

    def _export(self, body: bytes, count: int) -> None:
        problem = self._post(body)
        if problem is None:
            self.num_exported += count
            return
        self.num_dropped += count
        if time.monotonic() - self._warned_s >= _WARN_EVERY_S:
            self._warned_s = time.monotonic()
            logger.warning("traces are dropped: %s (tracing.endpoint)", problem)

    def _post(self, body: bytes) -> str | None:
        """Send a message; try again where that may help. Return what is wrong, or None."""
        pause_s, problem = _FIRST_PAUSE_S, None
        for _ in range(_MAX_TRIES):
            try:
                status = self._collector.post(body)
            except (OSError, http.client.HTTPException) as error:
                status, problem = None, f"the collector cannot be reached ({type(error).__name__})"
            if status is not None and 200 <= status < 300:
                return None
            if status is not None:
                problem = f"the collector answers {status}"
                if status not in _RETRIED:
                    break
            if self._closing.wait(pause_s):
                break
            pause_s *= 2
        return problem


class _Collector:
    """One connection to the collector, made again after an error."""

    def __init__(self, endpoint: str, timeout_s: float, headers: Mapping[str, str]) -> None:
        parts = urlsplit(endpoint)
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port
        self._path = parts.path if parts.path not in ("", "/") else _TRACES_PATH
        self._timeout_s = timeout_s
        self._headers = {**headers, "content-type": "application/x-protobuf", "user-agent": "alignedserve"}
        self._connection: http.client.HTTPConnection | None = None

    def post(self, body: bytes) -> int:
        """Return the status of the answer. Raises OSError or HTTPException."""
        connection = self._connection = self._connection or self._connect()
        try:
            connection.request("POST", self._path, body, self._headers)
            answer = connection.getresponse()
            answer.read(_MAX_ANSWER_BYTES)
        except BaseException:
            self.close()
            raise
        if not answer.isclosed():  # more than was read
            self.close()
        return answer.status

    def close(self) -> None:
        """Close the connection. May be repeated."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self._is_secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
