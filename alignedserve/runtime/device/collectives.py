"""Sums and collections over the ranks of one worker: through shared memory on a CPU, else by torch.distributed.

Every rank makes the same calls in the same order. Sums on a CPU are added from rank 0 to the last, so that they are the
same bits on every rank and whatever else is in the same tensor; NCCL chooses an order of its own."""

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from kernels.cpu.rank_exchange import ExchangeBroken, RankExchange

_DISTRIBUTED: Any = torch.distributed
_LOOPBACK = "127.0.0.1"
_LOST = "a rank of this worker has ended, or has not answered in time"


class Collectives(Protocol):
    """What the ranks of a worker do together. All raise ExchangeBroken when a rank has ended or does not answer."""

    rank: int
    size: int

    @property
    def exchange(self) -> RankExchange | None:
        """Return the shared memory that native passes add up through; None: they cannot."""

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Add up a contiguous tensor of every rank, in place, and return it."""

    def gather(self, x: Tensor) -> Tensor | None:
        """Return every rank's tensor [size, *x.shape] on rank 0, and None on others; all of one shape, contiguous."""

    def break_off(self) -> None:
        """End the waits of all ranks of this process's host, if that can be. From any thread."""


class SharedMemoryCollectives:
    """Collectives of ranks on one host's CPUs."""

    def __init__(self, exchange: RankExchange) -> None:
        self.exchange: RankExchange | None = exchange
        self.rank, self.size = exchange.rank, exchange.size
        self._exchange = exchange

    def all_reduce_(self, x: Tensor) -> Tensor:
        if self._exchange.sums(x.dtype):
            return self._exchange.all_reduce_(x)
        parts = self._exchange.all_gather(x)
        assert parts is not None, "every rank wants the sum"
        return x.copy_(_sum_in_order(parts))

    def gather(self, x: Tensor) -> Tensor | None:
        return self._exchange.all_gather(x, is_wanted=self.rank == 0)

    def break_off(self) -> None:
        self._exchange.break_off()


class ProcessGroupCollectives:
    """Collectives of a process group of torch.distributed: gloo on CPUs, NCCL on GPUs. The group is this worker's own:
    never init_process_group, no WORLD."""

    exchange: RankExchange | None = None

    def __init__(self, meeting: Path, rank: int, size: int, device: torch.device, *, timeout_s: float) -> None:
        """`meeting`: a file in a folder of this user alone, by which the ranks find each other.

        Raises ExchangeBroken if they do not meet."""
        self.rank, self.size = rank, size
        self._is_nccl = device.type == "cuda"
        make = _nccl_group if self._is_nccl else gloo_group
        try:
            store = _DISTRIBUTED.FileStore(str(meeting), size)
            store.set_timeout(timedelta(seconds=timeout_s))
            self._group = make(store, rank, size, timedelta(seconds=timeout_s))
            self.all_reduce_(torch.zeros(1, device=device))  # connects
        except RuntimeError as error:
            raise ExchangeBroken(f"the ranks of this worker do not meet: {str(error)[:200]}") from error

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Gloo's own sum would depend on a number's place in the tensor."""
        if not self._is_nccl:
            return x.copy_(_sum_in_order(self._all_gather(x)))
        try:
            self._group.allreduce([x]).wait()
        except RuntimeError as error:
            raise ExchangeBroken(_LOST) from error
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        parts = self._all_gather(x)
        return parts if self.rank == 0 else None

    def break_off(self) -> None:
        """Gloo notices a process that has ended by itself; NCCL's operations are aborted."""
        if self._is_nccl:
            self._group.abort()

    def _all_gather(self, x: Tensor) -> Tensor:
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        try:
            if self._is_nccl:
                self._group._allgather_base(parts, x).wait()
            else:
                self._group.allgather([list(parts.unbind())], [x]).wait()
        except RuntimeError as error:
            raise ExchangeBroken(_LOST) from error
        return parts


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, *, host: str = _LOOPBACK) -> Any:
    gloo = _DISTRIBUTED.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [gloo.create_device(hostname=host, lazy_init=False)]
    return gloo(store, rank, size, options)


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    nccl = _DISTRIBUTED.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)


def _sum_in_order(parts: Tensor) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total
