"""Arrays of the host brought to a device: many small ones in one copy, from page-locked memory where that is a GPU.

A copy of its own costs some microseconds however small it is, and one from ordinary memory holds up the host.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

_ALIGNMENT = 16  # bytes; of every array's place


class Packing:
    """Where arrays of these dtypes and at most these sizes lie in one run of bytes, in order."""

    def __init__(self, arrays: Sequence[Array], *, last_size: int | None = None) -> None:
        """`last_size`: room for so many elements of the last array, in place of those that it has."""
        sizes = [array.size for array in arrays]
        if last_size is not None:
            sizes[-1] = last_size
        widths = [size * array.itemsize for size, array in zip(sizes, arrays, strict=True)]
        ends = np.cumsum([-(-width // _ALIGNMENT) * _ALIGNMENT for width in widths])
        self._places = list(zip([0, *ends[:-1].tolist()], widths, strict=True))
        self._dtypes = [torch.from_numpy(array).dtype for array in arrays]
        self.num_bytes = int(ends[-1])

    def views(self, packed: Tensor) -> list[Tensor]:
        """The arrays, flat, within uint8 [num_bytes]."""
        return [
            packed[first : first + width].view(dtype)
            for (first, width), dtype in zip(self._places, self._dtypes, strict=True)
        ]

    def fill(self, packed: Array, arrays: Sequence[Array]) -> int:
        """Write them into uint8 [num_bytes]; how many bytes from the start are in use. Only the last may be shorter
        than its place."""
        used = 0
        for (first, width), array in zip(self._places, arrays, strict=True):
            assert array.nbytes <= width, "an array larger than its place"
            used = first + array.nbytes
            packed[first:used] = array.reshape(-1).view(np.uint8)
        return used


def to_device(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays as tensors. On a GPU the copy is only queued, on the current stream; on a CPU there is none, and the
    tensors share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packing = Packing(arrays)
    # Memory that is page-locked comes from a cache of PyTorch, which gives it out again when the copy is done.
    packed = torch.empty(packing.num_bytes, dtype=torch.uint8, pin_memory=True)
    packing.fill(packed.numpy(), arrays)
    views = packing.views(packed.to(device, non_blocking=True))
    return [view.view(array.shape) for view, array in zip(views, arrays, strict=True)]


class FixedArrays:
    """Arrays whose memory on the device stays where it is, to be filled anew: what a captured graph reads."""

    def __init__(self, arrays: Sequence[Array], device: torch.device, *, last_size: int) -> None:
        """Filled with these arrays at first; `last_size` as in Packing."""
        self._packing = Packing(arrays, last_size=last_size)
        self._packed = torch.zeros(self._packing.num_bytes, dtype=torch.uint8, device=device)
        self.tensors = self._packing.views(self._packed)
        self.fill(arrays)

    def fill(self, arrays: Sequence[Array]) -> None:
        """Arrays of the same dtypes and sizes, the last of any size that has room; queued on the current stream."""
        staged = torch.empty(self._packing.num_bytes, dtype=torch.uint8, pin_memory=self._packed.device.type == "cuda")
        used = self._packing.fill(staged.numpy(), arrays)
        self._packed[:used].copy_(staged[:used], non_blocking=True)
