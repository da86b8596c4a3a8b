"""Copies of the fake CUDA between host and devices: enqueued from page-locked memory, waited for from any other."""

import ctypes
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.support.fake_cuda.fakes import current
from tests.support.fake_cuda.machine import Call
from tests.support.fake_cuda.tensors import empty

_MOST_PIECES = 3  # a copy on a device is not atomic


def copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Perform Tensor.copy_."""
    fake = current()
    machine, memory = fake.machine, fake.memory
    is_out, is_in = not fake.is_own(target), not fake.is_own(source)
    device = (source if is_out else target).device
    if not is_out and not is_in and target.device != source.device:
        device = torch.device("cuda", machine.thread.device)
    host = target if is_out else source if is_in else None
    own = {"written": target.numel() * target.element_size(), "is_copy": host is not None}
    if host is None or not host.dim():
        value = source if host is None or is_out else source.clone()
        if host is not None and is_out:
            machine.synchronise(machine.current(device.index), "a value that the host reads")
            return target.copy_(fake.raw(source))
        with fake.on(device.index):
            pieces = _pieces(fake.alias(target), fake.alias(value))
            machine.enqueue("copy_", pieces, read=0 if host is not None else source.nbytes, **own)  # type: ignore[arg-type]
        return target
    is_pinned = memory.is_pinned(host.data_ptr())
    if not is_pinned:
        machine.refuse_in_capture("a copy with memory that is not page-locked")
        machine.counts.pageable_copies += 1
    else:
        memory.check_copyable(host)
    with fake.on(device.index):
        there = fake.alias(source if is_out else target)
        here = memory.alias(host) if is_pinned else host
        if is_in and not is_pinned:
            here = host.clone()  # the driver has read it when the call returns
        pieces = _pieces(here, there) if is_out else _pieces(there, here)
        machine.enqueue("copy_", pieces, **own)  # type: ignore[arg-type]
        queue = machine.current()
        if is_pinned and machine.thread.recording is None:
            memory.note_use(host.data_ptr(), queue.mark())
        if not non_blocking or (is_out and not is_pinned):
            machine.synchronise(queue, "a copy that the host waits for")
    return target


def _pieces(target: Tensor, source: Tensor) -> list[Call]:
    """Return the copy as steps."""
    if target.shape != source.shape or target.dim() < 2 or len(target) < 2:
        return [partial(target.copy_, source)]
    return [partial(to.copy_, part) for to, part in zip(_parts(target), _parts(source), strict=True)]


def _parts(rows: Tensor) -> Iterator[Tensor]:
    yield from rows.chunk(_MOST_PIECES)


def upload(source: Tensor, device: torch.device, *, non_blocking: bool = False, dtype: Any = None) -> Tensor:
    """Perform Tensor.to(device) of a tensor of the host."""
    converted = source if dtype in (None, source.dtype) else source.to(dtype)
    target = empty(converted.shape, dtype=converted.dtype, device=device)
    return copy(target, converted, non_blocking)


INVALID_VALUE, INVALID_HANDLE = 1, 400


def copy_batch(
    targets: int,
    sources: int,
    sizes: int,
    count: int,
    attributes: int,
    places: int,
    num_attributes: int,
    stream: int,
) -> int:
    """Perform cuMemcpyBatchAsync: the pieces in any order, from and to addresses as they are then."""
    fake = current()
    machine, memory = fake.machine, fake.memory
    if not stream or stream != machine.current().number:  # there is none on the default stream
        return INVALID_HANDLE
    lists = ((ctypes.c_uint64 * count).from_address(array) for array in (targets, sources, sizes))
    pieces = list(zip(*lists, strict=True))
    for target, source, size in pieces:
        ends = [(one, memory.arena_of(one)) for one in (target, source)]
        if any(arena not in memory.devices and not memory.can_copy(one, size) for one, arena in ends):
            return INVALID_VALUE
    machine.random.shuffle(pieces)
    steps: list[Call] = [partial(ctypes.memmove, *piece) for piece in pieces]
    machine.enqueue("cuMemcpyBatchAsync", steps, written=sum(size for _, _, size in pieces), is_copy=True)
    return 0
