"""Streams of work on one device: offload, prefetch and compute run in parallel, ordered by events alone.

Work on one stream runs in order. Work on different streams is unordered except for `wait`: a stream that uses memory
which another stream used last must wait for an event recorded after that use.

`CudaStreams` are CUDA streams; `HostStreams`, for a CPU, run everything at once. Tests have streams of their own, which
run the same calls in a random order among all that the waits allow."""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.runtime.device.cuda_driver import RowRuns, batched_copies

_CUDA: Any = torch.cuda


class Event(Protocol):
    """A point in a stream, reached when all earlier work on the stream is done."""

    def is_done(self) -> bool:
        """Return at once whether the event has been reached."""

    def synchronize(self) -> None:
        """Block the host until the event is reached; then the host may read what was copied out before it."""


class Stream(Protocol):
    """Work in order. No method waits for the device; all calls come from one thread."""

    @property
    def copies_runs_at_once(self) -> bool:
        """Whether a list of runs costs the host no more than one copy."""

    def run(self, operation: Callable[[], object]) -> None:
        """Enqueue an operation, which is called at once or later. Host memory that it reads must not change in between.
        The operation, and what it holds, stay alive until it is done; the caller keeps nothing."""

    def record(self) -> Event:
        """Record an event after all work enqueued so far."""

    def wait(self, event: Event) -> None:
        """Make all later work on this stream wait for the event, of any stream."""

    def copy_out(self, rows: Tensor, pinned: Tensor) -> None:
        """Copy from the device to the host, between contiguous tensors of one shape and dtype. `pinned` is page-locked.
        Both are kept alive until the copy is done; the caller must not touch their bytes before."""

    def copy_in(self, pinned: Tensor, rows: Tensor) -> None:
        """Copy from the host to the device, under the terms of `copy_out`."""

    def copy_out_runs(self, rows: Tensor, pinned: Tensor, runs: RowRuns) -> None:
        """Copy runs of rows to runs of the host's, in any order; uint8 [any number, row_bytes], and no row twice. As
        `copy_out` in all else; no run reaches over the end of memory that was registered at once."""

    def copy_in_runs(self, pinned: Tensor, rows: Tensor, runs: RowRuns) -> None:
        """Copy runs of the host's rows to runs of rows, under the terms of `copy_out_runs`."""

    def run_peer(self, operation: Callable[[], object], source: Tensor, target: Tensor, *, num_rows: int) -> None:
        """Enqueue an operation that copies so many rows of `source` to `target`, one of which may be mapped memory. As
        `run` in all else."""


class StreamDefaults:
    """Copies runs of rows one after the other, and runs copies between devices as any operation."""

    @property
    def copies_runs_at_once(self) -> bool:
        return False

    def copy_out_runs(self: Stream, rows: Tensor, pinned: Tensor, runs: RowRuns) -> None:
        for device_rows, host_rows in runs.slices():
            self.copy_out(rows[device_rows], pinned[host_rows])

    def copy_in_runs(self: Stream, pinned: Tensor, rows: Tensor, runs: RowRuns) -> None:
        for device_rows, host_rows in runs.slices():
            self.copy_in(pinned[host_rows], rows[device_rows])

    def run_peer(
        self: Stream, operation: Callable[[], object], source: Tensor, target: Tensor, *, num_rows: int
    ) -> None:
        self.run(operation)


class DeviceStreams(Protocol):
    """The streams of one device, by name."""

    def stream(self, name: str) -> Stream:
        """Return the stream of this name, created on first use."""


# --- the host itself


class HostEvent:
    """An event on a HostStream: always reached."""

    def is_done(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class HostStream(StreamDefaults):
    """A stream of a CPU, which runs everything at once."""

    _EVENT = HostEvent()

    def run(self, operation: Callable[[], object]) -> None:
        operation()

    def record(self) -> HostEvent:
        return self._EVENT

    def wait(self, event: Event) -> None:
        """The event may be of another process."""
        event.synchronize()

    def copy_out(self, rows: Tensor, pinned: Tensor) -> None:
        """Need not be page-locked."""
        pinned.copy_(rows)

    def copy_in(self, pinned: Tensor, rows: Tensor) -> None:
        """Need not be page-locked."""
        rows.copy_(pinned)


class HostStreams:
    """The streams of a CPU: one HostStream for every name."""

    def __init__(self) -> None:
        self._stream = HostStream()

    def stream(self, name: str) -> HostStream:
        return self._stream


# --- CUDA


class CudaEvent:
    """A CUDA event. `has_sleeping_wait`: a thread that waits sleeps; otherwise it spins, which ends some µs earlier."""

    def __init__(self, stream: Any, *, has_sleeping_wait: bool = False) -> None:
        self._event = _CUDA.Event(blocking=has_sleeping_wait)
        self._event.record(stream)

    def is_done(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def block(self, stream: Any) -> None:
        stream.wait_event(self._event)


class CudaStream(StreamDefaults):
    """A CUDA stream, ordered after earlier work on the current stream, such as loading weights."""

    def __init__(self, device: torch.device, *, has_sleeping_waits: bool = False) -> None:
        self._has_sleeping_waits = has_sleeping_waits
        self._stream: Any = _CUDA.Stream(device)
        self._stream.wait_stream(_CUDA.current_stream(device))
        self._held: deque[tuple[CudaEvent, object]] = deque()

    @property
    @override
    def copies_runs_at_once(self) -> bool:
        return batched_copies() is not None

    def run(self, operation: Callable[[], object]) -> None:
        """The operation is called at once; device memory that it allocates belongs to this stream. Comes after earlier
        work of this thread on the device's current stream, such as copies of the operation's inputs. PyTorch reuses a
        tensor's memory on the stream that made it as soon as nothing holds the tensor: the operation with its inputs is
        held until it is done here."""
        self._join()
        try:
            with _CUDA.stream(self._stream):
                operation()
        finally:
            self._hold(operation)

    def record(self) -> CudaEvent:
        return CudaEvent(self._stream, has_sleeping_wait=self._has_sleeping_waits)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), "an event of other streams"
        event.block(self._stream)

    def copy_out(self, rows: Tensor, pinned: Tensor) -> None:
        self._copy(rows, pinned, rows=rows, pinned=pinned)

    def copy_in(self, pinned: Tensor, rows: Tensor) -> None:
        self._copy(pinned, rows, rows=rows, pinned=pinned)

    @override
    def copy_out_runs(self, rows: Tensor, pinned: Tensor, runs: RowRuns) -> None:
        if not self._copy_at_once(rows, pinned, runs, is_out=True):
            super().copy_out_runs(rows, pinned, runs)

    @override
    def copy_in_runs(self, pinned: Tensor, rows: Tensor, runs: RowRuns) -> None:
        if not self._copy_at_once(rows, pinned, runs, is_out=False):
            super().copy_in_runs(pinned, rows, runs)

    def _copy_at_once(self, rows: Tensor, pinned: Tensor, runs: RowRuns, *, is_out: bool) -> bool:
        batch = batched_copies()
        if batch is None or not len(runs.counts):
            return False
        assert pinned.is_pinned(), "a copy with memory that is not page-locked would block the host"
        self._join()
        on_device, on_host, sizes = runs.addresses(rows, pinned)
        source, target = (on_device, on_host) if is_out else (on_host, on_device)
        with _CUDA.stream(self._stream):
            is_copied = batch.enqueue(source, target, sizes, self._stream.cuda_stream)
        self._hold((rows, pinned))
        return is_copied

    def _copy(self, source: Tensor, target: Tensor, *, rows: Tensor, pinned: Tensor) -> None:
        check_copy(source, target)
        assert pinned.is_pinned(), "a copy with memory that is not page-locked would block the host"
        self._join()
        with _CUDA.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._hold((rows, pinned))

    def _join(self) -> None:
        current = _CUDA.current_stream(self._stream.device)
        if not current.query():
            self._stream.wait_stream(current)

    def _hold(self, used: object) -> None:
        while self._held and self._held[0][0].is_done():
            self._held.popleft()
        self._held.append((self.record(), used))


class CudaStreams:
    """One CUDA stream for each name. `has_sleeping_waits`: see CudaEvent."""

    def __init__(self, device: torch.device, *, has_sleeping_waits: bool = False) -> None:
        self._device = device
        self._has_sleeping_waits = has_sleeping_waits
        self._streams: dict[str, CudaStream] = {}

    def stream(self, name: str) -> CudaStream:
        if name not in self._streams:
            self._streams[name] = CudaStream(self._device, has_sleeping_waits=self._has_sleeping_waits)
        return self._streams[name]


def streams_of(device: torch.device) -> DeviceStreams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()


def check_copy(source: Tensor, target: Tensor) -> None:
    """Check that no temporary memory and no conversion on the host is needed."""
    assert source.shape == target.shape, "a copy between tensors of two shapes"
    assert source.dtype == target.dtype, "a copy between tensors of two dtypes"
    assert all(map(Tensor.is_contiguous, (source, target))), "a copy with a tensor that is not contiguous"
