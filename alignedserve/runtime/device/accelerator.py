"""The device that holds a worker's blocks, for copies between memories: its memory, streams and driver.

`CudaAccelerator` is a GPU. A stand-in with separate memories is in the tests, where whole clusters copy by it.

What a process does with the device that it computes on: memory, errors, the current one of a thread."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

import psutil
import torch
from torch import Tensor

from alignedserve.core.errors import DeviceLost, HandoffRejected, NotEnoughMemory, PeerLost
from alignedserve.runtime.device.cuda_driver import CudaDriver
from alignedserve.runtime.device.devices import CUDA, accuse_suspects
from alignedserve.runtime.device.registered_memory import MemoryDriver
from alignedserve.runtime.device.streams import CudaStreams, DeviceStreams

_LONGEST_REASON = 300
_REFUSALS = {1: "invalid argument", 2: "out of memory"}  # of single calls, by CUDA's codes: what follows goes on
_CUDA: Any = torch.cuda

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device."""
    if device.type == CUDA:
        free, _ = _CUDA.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)


def used_by_others(device: torch.device) -> int:
    """Return the memory of a GPU that is not free before this process has allocated any; 0: it is no GPU."""
    if device.type != CUDA:
        return 0
    free, total = _CUDA.mem_get_info(device)
    return int(total) - int(free)


@contextlib.contextmanager
def working(device: torch.device) -> Iterator[None]:
    """Raise DeviceLost, naming the GPU and CUDA's own reason, where work on it fails within the context. After such an
    error every later call fails in this process, which has to end. Short memory, or a call refused for its arguments,
    is raised unchanged."""
    try:
        yield
    except torch.AcceleratorError as error:
        if is_refusal(error):
            raise
        accuse_suspects()
        raise DeviceLost(
            f"{device} stopped working ({_reason(error)}); this worker ends, and its requests go on elsewhere"
        ) from error


@contextlib.contextmanager
def copying(device: torch.device) -> Iterator[None]:
    """Do as `working`, and raise PeerLost where CUDA refuses a copy within the context: its blocks are not there."""
    try:
        with working(device):
            yield
    except torch.AcceleratorError as error:
        raise PeerLost(f"{device} refuses a copy: {_reason(error)}") from error


def is_refusal(error: torch.AcceleratorError) -> bool:
    """Return whether the device has refused a single call, and works on."""
    code = getattr(error, "error_code", None)  # of PyTorch 2.9 and newer
    return code in _REFUSALS or any(f"CUDA error: {name}" in _reason(error) for name in _REFUSALS.values())


def _reason(error: torch.AcceleratorError) -> str:
    lines = str(error.args[0] if error.args else "").strip().splitlines()
    return (lines or ["CUDA says no more"])[0][:_LONGEST_REASON]


def in_inference_mode(work: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """Decorate what computes without gradients, for every step: the mode is entered where it is not on already."""

    @wraps(work)
    def run(*args: P.args, **more: P.kwargs) -> ResultT:
        if torch.is_inference_mode_enabled():
            return work(*args, **more)
        with torch.inference_mode():
            return work(*args, **more)

    return run


def use_device(device: torch.device) -> None:
    """Make it the current device of the calling thread. Otherwise that is the first GPU, and page-locked memory, which
    belongs to no device, would take a few hundred megabytes of it for each process that computes on another."""
    if device.type == CUDA and device.index is not None:
        _CUDA.set_device(device)


def synchronize(device: torch.device) -> None:
    """Return when all work on the device is done."""
    if device.type == CUDA:
        _CUDA.synchronize(device)


_EXPANDABLE = "expandable_segments:True"
_OF_THIS_PROCESS: "WeakValueDictionary[tuple[bytes, int], Tensor]" = WeakValueDictionary()  # exported rows
_settings_lock = threading.Lock()


class SharedRows(NamedTuple):
    """Handle by which another process of this machine maps rows: what driver and torch need."""

    device_uuid: str  # processes may number the devices differently
    handle: bytes  # CUDA IPC handle of the allocation
    storage_bytes: int
    storage_offset: int  # of the storage in the allocation, in bytes
    counter_handle: bytes  # torch's reference count of mappings
    counter_offset: int
    event_handle: bytes
    event_is_awaited: bool


class Accelerator(Protocol):
    """One device. All rows are uint8 [num_rows, row_bytes]; from any thread."""

    driver: MemoryDriver

    @property
    def device(self) -> torch.device:
        """The device as torch names it."""

    def use(self) -> None:
        """Make it the current device of the calling thread."""

    def streams(self) -> DeviceStreams:
        """Return new streams for copies; a thread that waits for one of their events sleeps."""

    def empty(self, num_rows: int, row_bytes: int) -> Tensor:
        """Allocate rows on the device, of any content."""

    def pinned(self, num_rows: int, row_bytes: int) -> Tensor:
        """Allocate rows on the host that the device copies straight to and from."""

    def lendable(self, num_rows: int, row_bytes: int) -> Tensor:
        """Allocate zeroed rows on the device that other processes of this host may map. Raises NotEnoughMemory."""

    def exported(self, rows: Tensor) -> SharedRows:
        """Return a handle of lendable rows, for one other process."""

    def mapped(self, handle: SharedRows, num_rows: int, row_bytes: int) -> Tensor:
        """Return another process's rows, for copies by this device. Raises HandoffRejected with the reason."""


class CudaAccelerator:
    """A GPU, by the CUDA runtime of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.driver: MemoryDriver = CudaDriver(self._index)

    def use(self) -> None:
        use_device(self.device)

    def streams(self) -> CudaStreams:
        return CudaStreams(self.device, has_sleeping_waits=True)

    def empty(self, num_rows: int, row_bytes: int) -> Tensor:
        return torch.empty((num_rows, row_bytes), dtype=torch.uint8, device=self.device)

    def pinned(self, num_rows: int, row_bytes: int) -> Tensor:
        return torch.empty((num_rows, row_bytes), dtype=torch.uint8, pin_memory=True)

    def lendable(self, num_rows: int, row_bytes: int) -> Tensor:
        needed = f"{num_rows} blocks of {row_bytes} bytes need {num_rows * row_bytes} bytes on {self.device}"
        try:
            with _whole_segments():
                rows = torch.zeros((num_rows, row_bytes), dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            raise NotEnoughMemory(needed) from error
        _CUDA.current_stream(self.device).synchronize()
        return rows

    def exported(self, rows: Tensor) -> SharedRows:
        storage: Any = rows.untyped_storage()
        _, handle, size, offset, counter, counter_offset, event, is_awaited = storage._share_cuda_()
        uuid = str(_CUDA.get_device_properties(self.device).uuid)
        shared = SharedRows(uuid, handle, size, offset, counter, counter_offset, event, is_awaited)
        _OF_THIS_PROCESS[_key(shared)] = rows
        return shared

    def mapped(self, handle: SharedRows, num_rows: int, row_bytes: int) -> Tensor:
        """The rows get an address of this device, which reads them over its link. Mapping on the other device would
        take memory there, for a context of this process."""
        if handle.storage_bytes < num_rows * row_bytes:
            raise HandoffRejected("the blocks are more than the memory that is offered")
        uuids = [str(_CUDA.get_device_properties(index).uuid) for index in range(_CUDA.device_count())]
        if handle.device_uuid not in uuids:
            raise HandoffRejected("the device of the blocks is not visible to this process")
        theirs, mine = uuids.index(handle.device_uuid), self._index
        if theirs != mine and not _CUDA.can_device_access_peer(mine, theirs):
            raise HandoffRejected(f"{self.device} has no access to the memory of cuda:{theirs}, where the blocks are")
        rows = _OF_THIS_PROCESS.get(_key(handle))
        if rows is not None:  # CUDA maps no memory of the same process
            return rows[:num_rows]
        return self._map(handle)[: num_rows * row_bytes].view(num_rows, row_bytes)

    def _map(self, handle: SharedRows) -> Tensor:
        try:
            with _CUDA.device(self._index):
                storage = torch.UntypedStorage._new_shared_cuda(
                    self._index,
                    handle.handle,
                    handle.storage_bytes,
                    handle.storage_offset,
                    handle.counter_handle,
                    handle.counter_offset,
                    handle.event_handle,
                    handle.event_is_awaited,
                )
        except RuntimeError as error:
            raise HandoffRejected(f"the memory of the blocks cannot be mapped: {str(error)[:200]}") from error
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    @property
    def _index(self) -> int:
        return self.device.index if self.device.index is not None else int(_CUDA.current_device())


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the accelerator that holds blocks on this device; None: they are on the host."""
    return CudaAccelerator(device) if device.type == CUDA else None


def _key(handle: SharedRows) -> tuple[bytes, int]:
    return handle.handle, handle.storage_offset


@contextlib.contextmanager
def _whole_segments() -> Iterator[None]:
    settings_of = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    settings = settings_of() if settings_of is not None else ""
    if _EXPANDABLE not in settings:
        yield
        return
    change: Any = torch._C._accelerator_setAllocatorSettings
    with _settings_lock:
        change(settings.replace(_EXPANDABLE, "expandable_segments:False"))
        try:
            yield
        finally:
            change(settings)
