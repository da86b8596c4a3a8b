"""What stands in place of torch.cuda: streams, events, graphs, devices, and the driver's calls."""

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from typing_extensions import override

from tests.support.fake_cuda.fakes import current, is_installed
from tests.support.fake_cuda.machine import Mark, Queue, Recording

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    L2_cache_size=50 << 20,
)


def index_of(device: Any = None) -> int:
    if device is None:
        return current().machine.thread.device
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current().machine.thread.device if index is None else index


class Stream:
    """torch.cuda.Stream: one of PyTorch's 32 of a device, or the default one."""

    def __init__(self, device: Any = None, priority: int = 0, *, queue: Queue | None = None) -> None:
        self.queue = queue or current().machine.pooled(index_of(device))
        self.device = torch.device("cuda", self.queue.device)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    @override
    def __hash__(self) -> int:
        return id(self.queue)

    @property
    def cuda_stream(self) -> int:
        return self.queue.number

    def record_event(self, event: "Event | None" = None) -> "Event":
        made = event or Event()
        made.record(self)
        return made

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        machine = current().machine
        machine.refuse_in_capture("cudaStreamQuery")
        machine.breathe()
        with machine.lock:
            self.queue.is_ready()
            return self.queue.is_idle

    def synchronize(self) -> None:
        current().machine.synchronise(self.queue, "cudaStreamSynchronize")


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._mark: Mark | None = None
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        machine = current().machine
        queue = machine.current() if stream is None else stream.queue
        with machine.lock:
            recording = machine.thread.recording
            self._mark = Mark(recording) if recording is not None and recording.queue is queue else queue.mark()
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        machine = current().machine
        queue = machine.current() if stream is None else stream.queue
        mark, recording = self._mark, machine.thread.recording
        if mark is None:
            return
        is_captured = recording is not None and recording.queue is queue
        if (mark.graph is not None) != is_captured:
            if recording is not None:
                recording.is_broken = True
            raise torch.AcceleratorError("CUDA error: dependency created on uncaptured work in another stream")
        if not is_captured:
            with machine.lock:
                queue.wait(mark)

    def query(self) -> bool:
        machine = current().machine
        machine.refuse_in_capture("cudaEventQuery")
        machine.breathe()
        machine.check()
        return self._mark is None or self._is_reached(self._mark)

    def synchronize(self) -> None:
        machine = current().machine
        machine.refuse_in_capture("cudaEventSynchronize")
        machine.counts.synchronisations += 1
        if self._mark is not None:
            machine.run_until(self._mark)

    def elapsed_time(self, end: "Event") -> float:
        return max(0.0, end._time - self._time) * 1e3

    def _is_reached(self, mark: Mark) -> bool:
        machine = current().machine
        with machine.lock:
            for queue in machine.queues:
                queue.is_ready()
        return mark.is_done


@contextlib.contextmanager
def stream_context(stream: Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    if stream is None:
        yield
        return
    thread, queue = current().machine.thread, stream.queue
    device, before = thread.device, thread.current.get(queue.device)
    thread.device = queue.device
    thread.current[queue.device] = queue
    try:
        yield
    finally:
        thread.device = device
        if before is None:
            del thread.current[queue.device]
        else:
            thread.current[queue.device] = before


class CUDAGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.recording: Recording | None = None

    def pool(self) -> tuple[int, int]:
        assert self.recording is not None, "a graph that was not captured"
        return self.recording.pool

    def replay(self) -> None:
        assert self.recording is not None, "a graph that was not captured"
        assert not self.recording.is_broken, "a capture that failed"
        current().machine.replay(self.recording)

    def __del__(self) -> None:
        """Destroy it, which breaks what its thread captures."""
        under_way = current().machine.thread.recording if is_installed() else None
        if under_way is not None and under_way is not self.recording:
            under_way.is_broken = True


class graph:
    """torch.cuda.graph."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> None:
        self._graph = cuda_graph
        self._pool = pool
        self._stream = stream or Stream()
        self._context = stream_context(self._stream)

    def __enter__(self) -> None:
        machine = current().machine
        synchronize()
        self._context.__enter__()
        if self._pool is None:
            machine.num_pools += 1
            self._pool = (machine.num_pools, 0)
        machine.thread.recording = self._graph.recording = Recording(self._pool, self._stream.queue)

    def __exit__(self, *failure: Any) -> None:
        machine = current().machine
        machine.thread.recording = None
        machine.counts.captures += 1
        self._context.__exit__(*failure)
        recording = self._graph.recording
        if failure[0] is None and recording is not None and recording.is_broken:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")


class _Device:
    """torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)
        self._before = 0

    def __enter__(self) -> None:
        thread = current().machine.thread
        self._before, thread.device = thread.device, self._index

    def __exit__(self, *failure: object) -> None:
        current().machine.thread.device = self._before


def synchronize(device: Any = None) -> None:
    machine = current().machine
    machine.refuse_in_capture("cudaDeviceSynchronize")
    machine.counts.synchronisations += 1
    with machine.lock:
        marks = [queue.mark() for queue in machine.queues if queue.device == index_of(device)]
    for mark in marks:
        machine.run_until(mark)


def _set_device(device: Any) -> None:
    current().machine.thread.device = index_of(device)


def _set_stream(stream: Stream) -> None:
    thread = current().machine.thread
    thread.device = stream.queue.device
    thread.current[stream.queue.device] = stream.queue


def _properties(device: Any = None) -> Any:
    index = index_of(device)
    total = current().memory.devices[index].size
    return SimpleNamespace(**vars(H100), total_memory=total, uuid=f"GPU-fake-{index}", index=index)


def _free_and_total(device: Any = None) -> tuple[int, int]:
    arena = current().memory.devices[index_of(device)]
    return arena.size - arena.used, arena.size


def _recording() -> bool:
    return current().machine.thread.recording is not None


NAMES: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": CUDAGraph,
    "graph": graph,
    "device": _Device,
    "stream": stream_context,
    "cudart": lambda: current().driver.cudart,
    "synchronize": synchronize,
    "current_device": index_of,
    "current_stream": lambda device=None: Stream(queue=current().machine.current(index_of(device))),
    "default_stream": lambda device=None: Stream(queue=current().machine.defaults[index_of(device)]),
    "set_device": _set_device,
    "set_stream": _set_stream,
    "is_available": lambda: True,
    "device_count": lambda: current().machine.num_devices,
    "get_device_properties": _properties,
    "get_device_name": lambda device=None: H100.name,
    "get_device_capability": lambda device=None: (H100.major, H100.minor),
    "mem_get_info": _free_and_total,
    "can_device_access_peer": lambda device, peer: True,
    "is_current_stream_capturing": _recording,
    "memory_allocated": lambda device=None: current().memory.devices[index_of(device)].used,
    "empty_cache": lambda: None,
    "_sleep": lambda cycles: None,
}
