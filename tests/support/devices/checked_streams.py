"""Streams on a CPU in a random order among all that the waits allow.

There a missing wait soon shows as wrong bytes, where a device may hide it for days.
"""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import Tensor

from alignedserve.runtime.device.streams import Event, StreamDefaults, check_copy


class CheckedStreams:
    """Streams on a CPU that do nothing until the host waits, and then run single steps of random streams.

    The same seed and calls give the same order. A copy is one step per row, since copies on a device are not atomic.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: dict[str, CheckedStream] = {}

    def stream(self, name: str) -> "CheckedStream":
        """See DeviceStreams."""
        if name not in self._streams:
            self._streams[name] = CheckedStream(self)
        return self._streams[name]

    def drain(self) -> None:
        """Run all remaining work, in random order."""
        while any(stream.has_work() for stream in self._streams.values()):
            self.step()

    def step(self) -> None:
        """Run one step of a random stream that is not waiting."""
        ready = [stream for stream in self._streams.values() if stream.is_ready()]
        assert ready, "every stream is empty or waits for an event that cannot happen"
        ready[int(self._random.random() * len(ready))].step()


class Stepping(Protocol):
    """Streams whose work is done step by step, when the host waits."""

    def step(self) -> None:
        """Run one step of a stream that is not waiting."""


class CheckedEvent:
    """An event on a CheckedStream."""

    def __init__(self, streams: Stepping) -> None:
        self._streams = streams
        self._is_done = False

    def is_done(self) -> bool:
        """See Event. Polling makes no progress: a loop that polls for it would not end."""
        return self._is_done

    def synchronize(self) -> None:
        """See Event. An arbitrary part of the independent work runs as well."""
        while not self._is_done:
            self._streams.step()

    def complete(self) -> None:
        """Mark the event as reached; its stream calls this."""
        self._is_done = True

    def is_of(self, streams: Stepping) -> bool:
        """Return whether one of these streams reaches it."""
        return self._streams is streams


class CheckedStream(StreamDefaults):
    """Steps in order, each an operation or an event to wait for."""

    def __init__(self, streams: Stepping) -> None:
        self._streams = streams
        self._steps: deque[Callable[[], object] | CheckedEvent] = deque()

    def run(self, operation: Callable[[], object]) -> None:
        """See Stream. Called later."""
        self._steps.append(operation)

    def record(self) -> CheckedEvent:
        """See Stream."""
        event = CheckedEvent(self._streams)
        self._steps.append(event.complete)
        return event

    def wait(self, event: Event) -> None:
        """See Stream."""
        assert isinstance(event, CheckedEvent), "an event of other streams"
        self._steps.append(event)

    def copy_out(self, rows: Tensor, pinned: Tensor) -> None:
        """See Stream."""
        self._copy(rows, pinned)

    def copy_in(self, pinned: Tensor, rows: Tensor) -> None:
        """See Stream."""
        self._copy(pinned, rows)

    def has_work(self) -> bool:
        """Return whether a step is left."""
        return bool(self._steps)

    def is_ready(self) -> bool:
        """Return whether the next step can run now."""
        while self._steps and isinstance(event := self._steps[0], CheckedEvent) and event.is_done():
            self._steps.popleft()
        return bool(self._steps) and not isinstance(self._steps[0], CheckedEvent)

    def step(self) -> None:
        """Run the next step; only when `is_ready`."""
        operation = self._steps.popleft()
        assert not isinstance(operation, CheckedEvent), "a step before the event that it waits for"
        operation()

    def _copy(self, source: Tensor, target: Tensor) -> None:
        check_copy(source, target)
        for source_row, target_row in zip(source, target, strict=True):
            self._steps.append(partial(target_row.copy_, source_row))
