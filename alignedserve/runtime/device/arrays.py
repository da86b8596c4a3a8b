"""Copies of host arrays to a device: many small arrays in one copy, for a GPU from page-locked memory.

Every copy costs some microseconds however small it is, and a copy from pageable memory blocks the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cpu.native import load_native

Array = npt.NDArray[Any]

_ALIGNMENT = 16  # bytes, of every array's start

_native: Any = load_native("pack_arrays")


class ArrayPacking:
    """The places of arrays of these dtypes and at most these sizes in contiguous bytes, in order."""

    def __init__(self, arrays: Sequence[Array], *, last_size: int | None = None) -> None:
        """`last_size`: capacity of the last array in elements, instead of its size."""
        sizes = [array.size for array in arrays]
        if last_size is not None:
            sizes[-1] = last_size
        widths = [size * array.itemsize for size, array in zip(sizes, arrays, strict=True)]
        ends = np.cumsum([-(-width // _ALIGNMENT) * _ALIGNMENT for width in widths])
        self._places = list(zip([0, *ends[:-1].tolist()], widths, strict=True))
        self._bytes_at = np.array(self._places, np.int64).reshape(-1, 2)
        self._dtypes = [torch.from_numpy(array).dtype for array in arrays]
        self.num_bytes = int(ends[-1])

    def views(self, packed: Tensor) -> list[Tensor]:
        return [
            packed[first : first + width].view(dtype)
            for (first, width), dtype in zip(self._places, self._dtypes, strict=True)
        ]

    def fill(self, packed: Array, arrays: Sequence[Array]) -> int:
        """Write the arrays into uint8 [num_bytes], only the last below its capacity; return the used bytes."""
        if _native is not None:
            return int(_native.pack_arrays(packed, self._bytes_at, arrays))
        used = 0
        for (first, width), array in zip(self._places, arrays, strict=True):
            assert array.nbytes <= width, "an array larger than its place"
            used = first + array.nbytes
            packed[first:used] = array.reshape(-1).view(np.uint8)
        return used


def to_device(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on the device. The copy to a GPU is only enqueued, on the current stream; on a CPU
    the tensors share the arrays' memory. No arrays are no tensors."""
    if device.type == "cpu" or not arrays:
        return [torch.from_numpy(array) for array in arrays]
    if len(arrays) == 1:
        tensor = torch.from_numpy(arrays[0])
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
        return [staged.to(device, non_blocking=True)]
    packing = ArrayPacking(arrays)
    # Page-locked memory comes from PyTorch's cache, which reuses it once the copy is done.
    packed = torch.empty(packing.num_bytes, dtype=torch.uint8, pin_memory=True)
    packing.fill(packed.numpy(), arrays)
    views = packing.views(packed.to(device, non_blocking=True))
    return [view.view(array.shape) for view, array in zip(views, arrays, strict=True)]


class FixedArrays:
    """Arrays at fixed addresses on the device, refilled for every step: the inputs of a captured graph."""

    def __init__(self, arrays: Sequence[Array], device: torch.device, *, last_size: int) -> None:
        """Fill with these arrays; `last_size` as in ArrayPacking."""
        self._packing = ArrayPacking(arrays, last_size=last_size)
        self._packed = torch.zeros(self._packing.num_bytes, dtype=torch.uint8, device=device)
        self.tensors = self._packing.views(self._packed)
        self.fill(arrays)

    def fill(self, arrays: Sequence[Array]) -> None:
        staged = torch.empty(self._packing.num_bytes, dtype=torch.uint8, pin_memory=self._packed.device.type == "cuda")
        used = self._packing.fill(staged.numpy(), arrays)
        self._packed[:used].copy_(staged[:used], non_blocking=True)
