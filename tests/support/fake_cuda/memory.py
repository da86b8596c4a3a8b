"""Memory of the fake CUDA: PyTorch's caching allocator for each stream, and its cache of page-locked host memory.

Every tensor's memory belongs to the stream that was current when it was made. When nothing holds the tensor any more,
the memory is the next one's of that stream at once, however much work of other streams may still read it; only streams
named by `record_stream` are waited for. It is poisoned in its stream's order.
"""

import bisect
import mmap
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.devices.memory_drivers import StandInCuda
from tests.support.fake_cuda.machine import Machine, Mark, Queue

_ALIGNMENT = 512
POISON = 0xFF  # no number of any floating-point type, and no index


@dataclass(slots=True, eq=False)
class Block:
    """Memory of one tensor."""

    first: int  # in its arena
    size: int
    owner: Hashable  # the stream, or the pool of graphs, that it belongs to
    users: list[Queue] = field(default_factory=list)  # by record_stream
    uses: list[Mark] = field(default_factory=list)  # copies of page-locked memory that were enqueued


class Arena:
    """Addresses that are a device's, or page-locked memory of the host."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.bytes = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self.size = size
        self.used = 0
        self._whole: dict[torch.dtype, Tensor] = {}

    def has(self, address: int) -> bool:
        return self.base <= address < self.base + self.size

    def take(self, size: int) -> int:
        """Return the place of memory that nothing has used."""
        if self.used + size > self.size:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        self.used += size
        return self.used - size

    def alias(self, tensor: Tensor) -> Tensor:
        """Return the same memory as a tensor that keeps nothing alive."""
        dtype = tensor.dtype
        whole = self._whole.get(dtype)
        if whole is None:
            with torch.inference_mode(False):
                whole = self._whole[dtype] = torch.from_numpy(self.bytes).view(dtype)
        place = (tensor.data_ptr() - self.base) // dtype.itemsize
        return whole.as_strided(tensor.size(), tensor.stride(), place)


class Memory:
    """All memories of a machine."""

    def __init__(self, machine: Machine, driver: StandInCuda, *, device_bytes: int, host_bytes: int) -> None:
        self.machine = machine
        self.devices = [Arena(device_bytes) for _ in range(machine.num_devices)]
        self.host = Arena(host_bytes)
        self.registered = driver.registered  # bytes by address, of memory of others
        self.num_freed = 0
        self._free: dict[tuple[Hashable, int], list[Block]] = {}
        self._awaited: list[Block] = []  # freed, and still used by a stream that was recorded
        self._host_awaited: list[Block] = []
        self._blocks: dict[int, Block] = {}  # by address, while a tensor has it
        self._addresses: list[int] = []  # sorted
        self._watched: dict[int, Any] = {}
        self._arenas = [*self.devices, self.host]

    # --- of devices

    def on_device(self, device: int, size: int) -> Tensor:
        """Return bytes of the current stream's, of any content."""
        machine = self.machine
        with machine.lock:
            recording, queue = machine.thread.recording, machine.current(device)
            owner: Hashable = queue if recording is None or recording.queue is not queue else recording.pool
            if self._awaited:
                self._settle()
            return self._given(self.devices[device], owner, size)

    def record_stream(self, address: int, queue: Queue) -> None:
        with self.machine.lock:
            block = self.block_at(address)
            if block is not None and queue is not block.owner:
                block.users.append(queue)

    # --- of the host

    def pinned(self, size: int) -> Tensor:
        with self.machine.lock:
            self._settle_host()
            return self._given(self.host, "pinned", size)

    def is_pinned(self, address: int) -> bool:
        """Return whether the driver knows this byte; PyTorch asks for the first alone."""
        return self.host.has(address) or self._registration(address) is not None

    def check_copyable(self, tensor: Tensor) -> None:
        """Check that all bytes of a copy are in one registration, which CUDA demands."""
        if not self.can_copy(tensor.data_ptr(), tensor.nbytes):
            raise torch.AcceleratorError("CUDA error: invalid argument: a copy across two registrations")

    def can_copy(self, first: int, size: int) -> bool:
        """Return whether these bytes of the host are page-locked, and registered at once."""
        if self.host.has(first) or not size:
            return True
        registration = self._registration(first)
        return registration is not None and first + size <= registration + self.registered[registration]

    def note_use(self, address: int, mark: Mark) -> None:
        """Keep page-locked memory from being given away before this moment."""
        block = self.block_at(address)
        if block is not None:
            block.uses = [use for use in block.uses if not use.is_done] + [mark]

    def _registration(self, address: int) -> int | None:
        for first, size in self.registered.items():
            if first <= address < first + size:
                return first
        return None

    # --- both

    def arena_of(self, address: int) -> Arena | None:
        return next((arena for arena in self._arenas if arena.has(address)), None)

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a plain tensor's memory as a tensor that keeps none of it alive, if it is this machine's."""
        if not tensor.numel():
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        arena = self.arena_of(tensor.data_ptr())
        return tensor if arena is None else arena.alias(tensor)

    def block_at(self, address: int) -> Block | None:
        at = bisect.bisect_right(self._addresses, address) - 1
        return self._blocks[self._addresses[at]] if at >= 0 else None

    def holder(self, address: int) -> Any:
        """Return what keeps a block alive, for another tensor of the same memory."""
        at = bisect.bisect_right(self._addresses, address) - 1
        return self._watched[self._addresses[at]]()

    def _given(self, arena: Arena, owner: Hashable, size: int) -> Tensor:
        rounded = max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT
        free = self._free.get((owner, rounded))
        block = free.pop() if free else Block(arena.take(rounded), rounded, owner)
        rows = arena.bytes[block.first : block.first + block.size]
        address = arena.base + block.first
        self._blocks[address] = block
        bisect.insort(self._addresses, address)
        self._watched[address] = weakref.ref(rows, lambda _: self._dropped(arena, address))
        return torch.from_numpy(rows)

    def _dropped(self, arena: Arena, address: int) -> None:
        with self.machine.lock:
            self.num_freed += 1
            block = self._blocks.pop(address)
            del self._addresses[bisect.bisect_left(self._addresses, address)]
            del self._watched[address]
            if arena is self.host:
                self._host_awaited.append(block)
                return
            block.uses = [queue.mark() for queue in block.users]
            block.users = []
            if block.uses:
                self._awaited.append(block)
            else:
                self._give_back(arena, block)

    def _give_back(self, arena: Arena, block: Block) -> None:
        self._free.setdefault((block.owner, block.size), []).append(block)
        machine, owner, rows = self.machine, block.owner, arena.bytes[block.first : block.first + block.size]
        recording = machine.thread.recording
        if isinstance(owner, Queue):
            owner.add(lambda: rows.fill(POISON))
        elif recording is not None and recording.pool == owner:
            recording.steps.append(lambda: rows.fill(POISON))

    def _settle(self) -> None:
        """Give back memory of devices whose recorded streams have been waited for."""
        for block in [block for block in self._awaited if all(use.is_done for use in block.uses)]:
            self._awaited.remove(block)
            block.uses = []
            assert isinstance(block.owner, Queue), "memory of a stream"
            self._give_back(self.devices[block.owner.device], block)

    def _settle_host(self) -> None:
        """Give back page-locked memory whose copies are done."""
        awaited, self._host_awaited = self._host_awaited, []
        for block in awaited:
            if all(use.is_done for use in block.uses):
                block.uses = []
                self.host.bytes[block.first : block.first + block.size] = POISON
                self._free.setdefault((block.owner, block.size), []).append(block)
            else:
                self._host_awaited.append(block)
