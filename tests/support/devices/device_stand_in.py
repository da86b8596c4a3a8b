"""Devices with memories of their own, without a device: every access is on a stream of the device, or refused.

A worker has a device each. What a stream does is done later, one step of a random stream of the machine at a time, in
any order that events allow, whenever a thread waits. Copies between memories are noted in a timeline.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.errors import HandoffRejected, NotEnoughMemory
from alignedserve.runtime.device.accelerator import SharedRows
from alignedserve.runtime.device.registered_memory import MemoryDriver
from alignedserve.runtime.device.streams import Event
from alignedserve.runtime.kv.block_storage import BlockStorage, DevicePieces
from alignedserve.runtime.kv.staged_copies import CopyLanes
from kernels.cpu.row_digest import WORD_BYTES
from tests.support.devices.checked_streams import CheckedEvent, CheckedStream

HOST = "host"
PCIE, LINK, ON_DEVICE = "PCIe", "link", "on the device"
_FUNCTIONS: Any = torch.Tensor
# What looks at no element.
_VIEWS = {
    _FUNCTIONS.view,
    _FUNCTIONS.__len__,
    _FUNCTIONS.is_contiguous,
    _FUNCTIONS.numel,
    _FUNCTIONS.element_size,
    _FUNCTIONS.untyped_storage,
    _FUNCTIONS.as_subclass,
    *(getattr(_FUNCTIONS, name).__get__ for name in ("shape", "dtype", "device", "nbytes", "is_cuda", "ndim")),
}
_working = threading.local()  # .reached: the devices whose memory this thread's step may touch; .current


class Refused(AssertionError):
    """Memory was touched in another way than by a copy or an operation on a stream of its device."""


@dataclass(slots=True)
class Copy:
    """One copy between memories; its moments are numbers of the machine's steps."""

    way: str
    source: str
    target: str
    num_bytes: int
    is_of_blocks: bool  # otherwise of their digests
    ordered: int
    begun: int = 0
    ended: int = 0


class DeviceTensor(Tensor):
    """Memory of a StandInDevice."""

    owner: "StandInDevice"

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        tensors = list(_tensors((*args, *named.values())))
        owners = {one.owner for one in tensors if isinstance(one, DeviceTensor)}
        if not _is_view(func, args):
            _check_access(func, args, named, owners)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **named)
        return _owned(result, next(iter(owners))) if owners else result


def _is_view(func: Any, args: Any) -> bool:
    if func is _FUNCTIONS.__getitem__:
        return not isinstance(args[1], Tensor)
    return func in _VIEWS


def _check_access(func: Any, args: Any, named: Any, owners: "set[StandInDevice]") -> None:
    reached: frozenset[StandInDevice] = getattr(_working, "reached", frozenset())
    names = ", ".join(sorted(owner.name for owner in owners))
    what = getattr(func, "__name__", str(func))
    if not owners <= reached:
        raise Refused(f"{what} on memory of {names} is on no stream that reaches it")
    if what in ("numpy", "cpu", "tolist", "item", "data_ptr", "__array__"):
        raise Refused(f"{what}: memory of {names} is not the host's")
    written = named.get("out", args[0] if args and what.endswith("_") and not what.endswith("__") else None)
    if isinstance(written, Tensor) and not isinstance(written, DeviceTensor):
        raise Refused(f"{what} writes to the host outside a copy")


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _owned(result: Any, owner: "StandInDevice") -> Any:
    if isinstance(result, Tensor):
        tensor: DeviceTensor = result.as_subclass(DeviceTensor)
        tensor.owner = owner
        return tensor
    if isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
        return type(result)(_owned(one, owner) for one in result)
    return result


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


class Machine:
    """Devices, their links to each other and to the host, and the timeline of what crossed them."""

    def __init__(self, seed: int = 0, *, device_bytes: int = 1 << 40) -> None:
        """`device_bytes`: that each can lend."""
        self.timeline: list[Copy] = []
        self.device_bytes = device_bytes
        self.lent: dict[bytes, DeviceTensor] = {}
        self._lock = threading.RLock()
        self._random = random.Random(seed)
        self._streams: list[StandInStream] = []
        self._moments = count(1)
        self._devices: dict[str, StandInDevice] = {}

    def device(self, name: str) -> "StandInDevice":
        if name not in self._devices:
            self._devices[name] = StandInDevice(self, name)
        return self._devices[name]

    def moment(self) -> int:
        return next(self._moments)

    def add(self, stream: "StandInStream") -> None:
        with self._lock:
            self._streams.append(stream)

    def step(self) -> None:
        """Run one step of a random stream among those that are not waiting."""
        with self._lock:
            ready = [stream for stream in self._streams if stream.is_ready()]
            if ready:  # otherwise another thread has run what was awaited
                self._random.choice(ready).step()

    def moved(self, way: str, source: str | None = None, target: str | None = None) -> list[Copy]:
        """Return the copies of blocks that went this way."""
        with self._lock:
            of_blocks = [copy for copy in self.timeline if copy.is_of_blocks and copy.way == way]
        return [copy for copy in of_blocks if source in (None, copy.source) and target in (None, copy.target)]

    def note(self, source: Tensor, target: Tensor, num_bytes: int, row_bytes: int) -> Copy:
        names = [one.owner.name if isinstance(one, DeviceTensor) else HOST for one in (source, target)]
        way = PCIE if HOST in names else ON_DEVICE if names[0] == names[1] else LINK
        copy = Copy(way, names[0], names[1], num_bytes, row_bytes != WORD_BYTES, self.moment())
        with self._lock:
            self.timeline.append(copy)
        return copy


class StandInDevice:
    """An Accelerator with its own memory."""

    device = torch.device("cpu")

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        self.driver: MemoryDriver = self
        self.num_streams = 0
        self._host_memory: dict[int, int] = {}  # bytes that the device reaches, by address
        self.num_lent_bytes = 0

    # --- MemoryDriver

    def register(self, address: int, size: int) -> str | None:
        self._host_memory[address] = size
        return None

    def unregister(self, address: int) -> None:
        del self._host_memory[address]

    # --- Accelerator

    def use(self) -> None:
        _working.current = self

    def streams(self) -> "StandInStreams":
        self.check_current()
        self.num_streams += 1
        return StandInStreams(self)

    def empty(self, num_rows: int, row_bytes: int) -> Tensor:
        return self.adopt(torch.full((num_rows, row_bytes), 0xA5, dtype=torch.uint8))

    def pinned(self, num_rows: int, row_bytes: int) -> Tensor:
        self.check_current()
        rows = torch.full((num_rows, row_bytes), 0x5A, dtype=torch.uint8)
        self.register(rows.data_ptr(), rows.nbytes)
        return rows

    def lendable(self, num_rows: int, row_bytes: int) -> Tensor:
        self.num_lent_bytes += num_rows * row_bytes
        if self.num_lent_bytes > self.machine.device_bytes:
            raise NotEnoughMemory(f"{num_rows} blocks of {row_bytes} bytes on {self.name}")
        return self.empty(num_rows, row_bytes)

    def exported(self, rows: Tensor) -> SharedRows:
        assert isinstance(rows, DeviceTensor)
        handle = f"{self.name} {len(self.machine.lent)}".encode()
        self.machine.lent[handle] = rows
        return SharedRows(self.name, handle, rows.nbytes, 0, b"", 0, b"", False)

    def mapped(self, handle: SharedRows, num_rows: int, row_bytes: int) -> Tensor:
        self.check_current()
        if handle.storage_bytes < num_rows * row_bytes:
            raise HandoffRejected("the blocks are more than the memory that is offered")
        return self.machine.lent[handle.handle][:num_rows]

    # --- the stand-in's own

    def adopt(self, memory: Tensor) -> Tensor:
        owned: Tensor = _owned(memory, self)
        return owned

    def check_current(self) -> None:
        if getattr(_working, "current", None) is not self:
            raise Refused(f"a thread that copies on {self.name} has not chosen it")

    def check_reachable(self, memory: Tensor) -> None:
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        if not any(first <= begin and end <= first + size for first, size in self._host_memory.items()):
            raise Refused(f"a copy of {self.name} with host memory that is not registered with it")


class StandInStream(CheckedStream):
    """A stream that refuses what a device would: memory of others, and host memory that is not registered."""

    def __init__(self, device: StandInDevice) -> None:
        super().__init__(device.machine)
        self._device = device
        self._machine = device.machine
        device.machine.add(self)

    @override
    def run(self, operation: Callable[[], object]) -> None:
        self._device.check_current()
        self._steps.append(partial(_reaching, frozenset((self._device,)), operation))

    @override
    def wait(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent) and event.is_of(self._machine), "an event of other streams"  # noqa: PT018
        super().wait(event)

    @override
    def copy_out(self, rows: Tensor, pinned: Tensor) -> None:
        self._check_own(rows)
        self._device.check_reachable(pinned)
        self._copy(rows, pinned)

    @override
    def copy_in(self, pinned: Tensor, rows: Tensor) -> None:
        self._check_own(rows)
        self._device.check_reachable(pinned)
        self._copy(pinned, rows)

    @override
    def run_peer(self, operation: Callable[[], object], source: Tensor, target: Tensor, *, num_rows: int) -> None:
        self._check_own(source, target)
        copy = self._machine.note(source, target, num_rows * source.shape[1], source.shape[1])
        owners = frozenset(one.owner for one in (source, target) if isinstance(one, DeviceTensor))
        self._steps.append(partial(self._begin, copy))
        self._steps.append(partial(_reaching, owners, operation))
        self._steps.append(partial(self._end, copy))

    def _check_own(self, *memories: Tensor) -> None:
        self._device.check_current()
        if not any(isinstance(one, DeviceTensor) and one.owner is self._device for one in memories):
            raise Refused(f"a copy on a stream of {self._device.name} with none of its memory")

    @override
    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Copy row by row: a copy on a device is not atomic."""
        assert source.shape == target.shape, "a copy between tensors of two shapes"
        copy = self._machine.note(source, target, source.nbytes, source.shape[1])
        self._steps.append(partial(self._begin, copy))
        for source_row, target_row in zip(_plain(source), _plain(target), strict=True):
            self._steps.append(partial(target_row.copy_, source_row))
        self._steps.append(partial(self._end, copy))

    def _begin(self, copy: Copy) -> None:
        copy.begun = self._machine.moment()

    def _end(self, copy: Copy) -> None:
        copy.ended = self._machine.moment()


class StandInStreams:
    """Streams of one device, by name."""

    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self._streams: dict[str, StandInStream] = {}

    def stream(self, name: str) -> StandInStream:
        if name not in self._streams:
            self._streams[name] = StandInStream(self._device)
        return self._streams[name]


@contextmanager
def _reached(devices: frozenset[StandInDevice]) -> Iterator[None]:
    before: frozenset[StandInDevice] = getattr(_working, "reached", frozenset())
    _working.reached = devices
    try:
        yield
    finally:
        _working.reached = before


def _reaching(devices: frozenset[StandInDevice], operation: Callable[[], object]) -> None:
    with _reached(devices):
        operation()


class StandInStorage(BlockStorage):
    """The blocks of a storage on the CPU, whose engine computes on them, as copies see them on a device."""

    def __init__(self, storage: BlockStorage, device: StandInDevice) -> None:
        self.layout = storage.layout
        self.part = storage.part
        self.num_blocks = storage.num_blocks
        self.device = storage.device
        self.pending_copies = storage.pending_copies
        self.accelerator = device
        self.lanes = CopyLanes(device)
        self._bytes = device.adopt(storage.bytes)
        self._blocks = storage._blocks  # as kernels see them, which run on the device
        self.kinds = storage.kinds
        self._pieces = DevicePieces(self._bytes, self.lanes)
