"""Sends traces to a collector by OpenTelemetry's exporter, OTLP over HTTP, from a thread of its own.

The event loop only puts a call that has ended into a bounded queue: a collector that is dead, slow or hanging costs
spans, which are counted, and no token any time."""

import math
import queue
import threading
import time
from collections.abc import Mapping

from alignedserve.api.timelines.explanation import end_of, num_spans
from alignedserve.api.timelines.timeline import LAST_NOTES_S, Timeline
from alignedserve.config.sections import TracingConfig

_BATCH = 128  # calls in one message at most
_GATHER_S = 0.5  # of waiting for further calls


class TraceExporter:
    """Takes traced calls at their ends. `close` ends its thread, which then sends what it can within a moment."""

    def __init__(self, config: TracingConfig, gateway: str, headers: Mapping[str, str] | None = None) -> None:
        """`headers`: what the collector wants beside the message. Starts no thread before the first call ends."""
        self._config = config
        self._gateway = gateway
        self._headers = dict(headers or {})
        self._queue: queue.Queue[Timeline] = queue.Queue(config.max_queued_requests)
        self._first: Timeline | None = None  # of those that left the queue; its last notes may be on their way
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_exported = 0  # spans, like the next
        self.num_dropped = 0

    def add(self, timeline: Timeline) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(timeline)
        except queue.Full:
            self.num_dropped += num_spans(timeline)

    def close(self, timeout_s: float = 2.0) -> None:
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        # Here, as the SDK takes half a second to load, which a gateway without traces need not spend.
        from alignedserve.api.timelines.spans import SpanSender

        sender = SpanSender(self._config, self._gateway, self._headers)
        while not (self._closing.is_set() and self._first is None and self._queue.empty()):
            timelines: list[Timeline] = []
            self._closing.wait(_GATHER_S)
            until_s = math.inf if self._closing.is_set() else time.monotonic() - LAST_NOTES_S
            while len(timelines) < _BATCH and (timeline := self._next()) is not None:
                if end_of(timeline) > until_s:
                    self._first = timeline
                    break
                timelines.append(timeline)
            if not timelines:
                continue
            num_sent, is_taken = sender.send(timelines)
            self.num_exported += num_sent if is_taken else 0
            self.num_dropped += 0 if is_taken else num_sent
        sender.close()

    def _next(self) -> Timeline | None:
        first, self._first = self._first, None
        try:
            return self._queue.get_nowait() if first is None else first
        except queue.Empty:
            return None
