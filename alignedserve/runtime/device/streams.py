"""Streams of work on one device: offload, prefetch and compute beside each other, every dependency an event.

Within a stream, work happens in the order in which it was put there. Between streams there is no order at all but the
one that `wait` makes: whoever uses memory that another stream used last waits for an event recorded behind that use.

`CudaStreams` are CUDA streams; `HostStreams`, of a CPU, do everything at once. `CheckedStreams` run the same calls on a
CPU, in an order drawn at random among all that the waits allow: there a wait that is missing soon shows as wrong bytes,
where a device may hide it for days.
"""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

_CUDA: Any = torch.cuda


class Event(Protocol):
    """A point in a stream, reached when all that was put there before it has been done."""

    def is_done(self) -> bool:
        """Whether it has been reached. Returns at once."""

    def synchronize(self) -> None:
        """Return when it has been reached: from then on the host may read what was copied out before it."""


class Stream(Protocol):
    """Work in order. Nothing here waits for the device; all calls come from one thread."""

    def run(self, operation: Callable[[], object]) -> None:
        """Put the operation behind all that is here. It is called at once or later, so nothing that it reads on the
        host may change in between; tensors that it uses stay alive until an event behind it is done."""

    def record(self) -> Event:
        """An event behind all that is here now."""

    def wait(self, event: Event) -> None:
        """What is put here from now on begins when the event, of any stream, is done."""

    def copy_out(self, rows: Tensor, pinned: Tensor) -> None:
        """From the device to the host. Both contiguous, of one shape and dtype; `pinned` is page-locked. Both are held
        until the copy is done, and it is the caller's to leave their bytes alone so long."""

    def copy_in(self, pinned: Tensor, rows: Tensor) -> None:
        """From the host to the device, under the terms of `copy_out`."""


class DeviceStreams(Protocol):
    """The streams of one device."""

    def stream(self, name: str) -> Stream:
        """The stream of this name, made when it is first asked for."""


# --- the host itself


class HostEvent:
    """Everything is done when it is asked for, so this is."""

    def is_done(self) -> bool:
        """See Event."""
        return True

    def synchronize(self) -> None:
        """See Event."""


class HostStream:
    """Does what it is asked for at once."""

    _EVENT = HostEvent()

    def run(self, operation: Callable[[], object]) -> None:
        """See Stream."""
        operation()

    def record(self) -> HostEvent:
        """See Stream."""
        return self._EVENT

    def wait(self, event: Event) -> None:
        """See Stream."""

    def copy_out(self, rows: Tensor, pinned: Tensor) -> None:
        """See Stream. Need not be page-locked."""
        pinned.copy_(rows)

    def copy_in(self, pinned: Tensor, rows: Tensor) -> None:
        """See Stream. Need not be page-locked."""
        rows.copy_(pinned)


class HostStreams:
    """Of a CPU: one stream, which does everything at once."""

    def __init__(self) -> None:
        self._stream = HostStream()

    def stream(self, name: str) -> HostStream:
        """See DeviceStreams."""
        return self._stream


# --- CUDA


class CudaEvent:
    """A CUDA event."""

    def __init__(self, stream: Any) -> None:
        self._event = _CUDA.Event()
        self._event.record(stream)

    def is_done(self) -> bool:
        """See Event."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """See Event. Other threads of the process go on meanwhile."""
        self._event.synchronize()

    def hold_up(self, stream: Any) -> None:
        """Let what is put on the stream from now on begin when this is done."""
        stream.wait_event(self._event)


class CudaStream:
    """A CUDA stream. Its first work comes after all that was begun on the device's current stream before it was made,
    such as loading weights."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = _CUDA.Stream(device)
        self._stream.wait_stream(_CUDA.current_stream(device))
        self._held: deque[tuple[CudaEvent, Tensor]] = deque()

    def run(self, operation: Callable[[], object]) -> None:
        """See Stream. Called at once; memory that it allocates on the device belongs to this stream. Comes after what
        this thread has begun on the device by itself, such as bringing over what the operation reads."""
        self._stream.wait_stream(_CUDA.current_stream(self._stream.device))
        with _CUDA.stream(self._stream):
            operation()

    def record(self) -> CudaEvent:
        """See Stream."""
        return CudaEvent(self._stream)

    def wait(self, event: Event) -> None:
        """See Stream."""
        assert isinstance(event, CudaEvent), "an event of other streams"
        event.hold_up(self._stream)

    def copy_out(self, rows: Tensor, pinned: Tensor) -> None:
        """See Stream."""
        self._copy(rows, pinned, rows=rows, pinned=pinned)

    def copy_in(self, pinned: Tensor, rows: Tensor) -> None:
        """See Stream."""
        self._copy(pinned, rows, rows=rows, pinned=pinned)

    def _copy(self, source: Tensor, target: Tensor, *, rows: Tensor, pinned: Tensor) -> None:
        _check_copy(source, target)
        assert pinned.is_pinned(), "a copy with memory that is not page-locked would hold up the host"
        with _CUDA.stream(self._stream):
            target.copy_(source, non_blocking=True)
        # Freed by the stream that allocated it, the memory would be given out again while this one still copies.
        rows.record_stream(self._stream)
        while self._held and self._held[0][0].is_done():
            self._held.popleft()
        self._held.append((self.record(), pinned))


class CudaStreams:
    """One CUDA stream for each name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, CudaStream] = {}

    def stream(self, name: str) -> CudaStream:
        """See DeviceStreams."""
        if name not in self._streams:
            self._streams[name] = CudaStream(self._device)
        return self._streams[name]


# --- checked, on a CPU


class CheckedStreams:
    """Streams on a CPU in which nothing happens until the host waits; then single steps of streams drawn at random do.

    The same seed and calls give the same order. A copy is one step per row: a device does not copy at one stroke.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  (an order to try, not a secret)
        self._streams: dict[str, CheckedStream] = {}

    def stream(self, name: str) -> "CheckedStream":
        """See DeviceStreams."""
        if name not in self._streams:
            self._streams[name] = CheckedStream(self)
        return self._streams[name]

    def drain(self) -> None:
        """Do all that is left, in an order drawn like any other."""
        while any(stream.has_work() for stream in self._streams.values()):
            self.step()

    def step(self) -> None:
        """One step of a stream drawn among those whose next one waits for nothing."""
        ready = [stream for stream in self._streams.values() if stream.is_ready()]
        assert ready, "every stream is empty or waits for an event that cannot happen"
        ready[int(self._random.random() * len(ready))].step()


class CheckedEvent:
    """Done when its stream has come to it."""

    def __init__(self, streams: CheckedStreams) -> None:
        self._streams = streams
        self._is_done = False

    def is_done(self) -> bool:
        """See Event. Nothing happens by asking: a loop that asks until it is so would not end."""
        return self._is_done

    def synchronize(self) -> None:
        """See Event. Of what the event does not depend on, an arbitrary part is done as well."""
        while not self._is_done:
            self._streams.step()

    def happen(self) -> None:
        """Called by its stream."""
        self._is_done = True


class CheckedStream:
    """Steps in order, each an operation or an event to wait for."""

    def __init__(self, streams: CheckedStreams) -> None:
        self._streams = streams
        self._steps: deque[Callable[[], object] | CheckedEvent] = deque()

    def run(self, operation: Callable[[], object]) -> None:
        """See Stream. Called later."""
        self._steps.append(operation)

    def record(self) -> CheckedEvent:
        """See Stream."""
        event = CheckedEvent(self._streams)
        self._steps.append(event.happen)
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
        """Whether a step is left."""
        return bool(self._steps)

    def is_ready(self) -> bool:
        """Whether the next step may be done now."""
        while self._steps and isinstance(event := self._steps[0], CheckedEvent) and event.is_done():
            self._steps.popleft()
        return bool(self._steps) and not isinstance(self._steps[0], CheckedEvent)

    def step(self) -> None:
        """Do the next step; only when `is_ready`."""
        operation = self._steps.popleft()
        assert not isinstance(operation, CheckedEvent), "a step before the event that it waits for"
        operation()

    def _copy(self, source: Tensor, target: Tensor) -> None:
        _check_copy(source, target)
        for source_row, target_row in zip(source, target, strict=True):
            self._steps.append(partial(target_row.copy_, source_row))


def streams_of(device: torch.device) -> DeviceStreams:
    """The real ones of this device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


def _check_copy(source: Tensor, target: Tensor) -> None:
    """Anything else would go by way of memory that nobody holds, or convert on the host."""
    assert source.shape == target.shape, "a copy between tensors of two shapes"
    assert source.dtype == target.dtype, "a copy between tensors of two dtypes"
    assert all(map(Tensor.is_contiguous, (source, target))), "a copy with a tensor that is not contiguous"
