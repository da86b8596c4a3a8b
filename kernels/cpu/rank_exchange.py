"""Sums over the ranks of a worker through memory that their processes share (kernels/csrc/rank_exchange).

Added from rank 0 to the last, in float32: the same bits on every rank, whatever else is computed in the same call."""

import mmap
import os
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.native import load_native
from kernels.cpu.unnamed_files import unnamed_file

_native = load_native("RankExchange")

_SLOT_BYTES = 4 << 20  # what a rank gives at a time; larger arrays take several calls
_DTYPES = (torch.float32, torch.bfloat16)


class ExchangeBroken(RuntimeError):
    """A rank has not come to a call in time, or the exchange was broken off."""


def has_rank_exchange() -> bool:
    """Return whether the kernel is built."""
    return _native is not None


def make_exchange_memory(size: int, slot_bytes: int = _SLOT_BYTES) -> int:
    """Return the descriptor of anonymous memory for all ranks, which the caller closes once they have mapped it."""
    descriptor = unnamed_file("rank-exchange")
    os.ftruncate(descriptor, _native.rank_exchange_bytes(size, slot_bytes))
    return descriptor


class RankExchange:
    """One rank's end. Every rank makes the same calls in the same order, each from one thread at a time."""

    __slots__ = ("_memory", "kernel", "rank", "size", "slot_bytes")

    def __init__(
        self, descriptor: int, rank: int, size: int, *, timeout_s: float, slot_bytes: int = _SLOT_BYTES
    ) -> None:
        """`descriptor`: of the memory of make_exchange_memory. `timeout_s`: how long a call waits for other ranks."""
        self.rank, self.size, self.slot_bytes = rank, size, slot_bytes
        self._memory = mmap.mmap(descriptor, _native.rank_exchange_bytes(size, slot_bytes))
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self.kernel: Any = _native.RankExchange(address, rank, size, slot_bytes, timeout_s)

    @staticmethod
    def sums(dtype: torch.dtype) -> bool:
        """Return whether `all_reduce_` takes tensors of this dtype."""
        return dtype in _DTYPES

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Add up a contiguous tensor of every rank, in place, and return it. Raises ExchangeBroken."""
        assert x.is_contiguous(), "one run of memory"
        assert x.dtype in _DTYPES, f"sums are of float32 or bfloat16, not {x.dtype}"
        assert x.device.type == "cpu", "native kernels run on the CPU"
        is_bfloat16 = x.dtype == torch.bfloat16
        self._check(self.kernel.all_reduce(x.data_ptr(), x.numel(), is_bfloat16, torch.get_num_threads()))
        return x

    def all_gather(self, x: Tensor, *, is_wanted: bool = True) -> Tensor | None:
        """Return every rank's tensor [size, *x.shape], each of one shape and contiguous; None unless it `is_wanted`.
        Raises ExchangeBroken."""
        assert x.is_contiguous(), "one run of memory"
        assert x.device.type == "cpu", "native kernels run on the CPU"
        tensor = torch.empty((self.size, *x.shape), dtype=x.dtype) if is_wanted else None
        address = 0 if tensor is None else tensor.data_ptr()
        self._check(self.kernel.all_gather(x.data_ptr(), x.numel() * x.element_size(), address))
        return tensor

    def break_off(self) -> None:
        """End the waits of all ranks, now and from now on. From any thread."""
        self.kernel.break_off()

    def check(self) -> None:
        """Raise ExchangeBroken if the exchange is broken: results of the latest calls mean nothing."""
        self._check(not self.kernel.is_broken)

    @staticmethod
    def _check(is_whole: bool) -> None:
        if not is_whole:
            raise ExchangeBroken("a rank of this worker has ended, or has not answered in time")
