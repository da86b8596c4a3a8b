"""NCCL on the fake CUDA: ranks are threads of this process, each with a GPU of its own.

An operation is a step of the stream that was current when it was called. It is done once every rank's stream has come
to its own, in place for all of them; the host waits for nothing but, at the first call, for the others to have come.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tests.support.fake_cuda.fakes import current
from tests.support.fake_cuda.machine import Meets

_UNDEFINED = float("nan")


class Meeting:
    """One group, as all its ranks see it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.arrived: dict[int, Collective] = {}  # by rank, what its stream has come to
        self.done: set[int] = set()  # ranks whose streams have yet to go on from what is done for them
        self.aborted: set[int] = set()


class Collective(Meets):
    """One rank's part of an operation: a step that is ready when all ranks have come to theirs. May be done again."""

    def __init__(self, meeting: Meeting, rank: int, key: tuple[Any, ...], parts: tuple[Tensor, Tensor]) -> None:
        """`parts`: what it gives and what it gets."""
        self.key, self.given, self.result = key, *parts
        self._meeting, self._rank = meeting, rank

    @override
    def is_ready(self) -> bool:
        """Return whether the rank's stream can go on."""
        meeting = self._meeting
        if self._rank in meeting.done or self._rank in meeting.aborted:
            return True
        meeting.arrived[self._rank] = self
        return len(meeting.arrived) == meeting.size

    @override
    def __call__(self) -> None:
        meeting = self._meeting
        if self._rank in meeting.aborted:
            self.result.fill_(_UNDEFINED if self.result.is_floating_point() else 0)
        elif self._rank in meeting.done:
            meeting.done.remove(self._rank)
        else:
            ranks = [meeting.arrived[rank] for rank in range(meeting.size)]
            keys = [one.key for one in ranks]
            assert keys.count(keys[0]) == len(keys), f"ranks of one group do different things: {keys}"
            values = torch.stack([one.given for one in ranks])
            for one in ranks:
                one.result.copy_(values.sum(0) if self.key[0] == "allreduce" else values)
            meeting.done.update(set(range(meeting.size)) - {self._rank})
            meeting.arrived.clear()


class _Options:
    _timeout = timedelta(minutes=10)


class _Work:
    def wait(self) -> bool:
        """Have the current stream wait, which is the one that does the work."""
        return True


class ProcessGroupNCCL:
    """torch.distributed.ProcessGroupNCCL."""

    Options = _Options

    def __init__(self, store: Any, rank: int, size: int, options: _Options) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, options._timeout
        self._meeting: Meeting | None = None

    def allreduce(self, tensors: Sequence[Tensor]) -> _Work:
        (x,) = tensors
        return self._enqueue("allreduce", x, x)

    def _allgather_base(self, out: Tensor, x: Tensor) -> _Work:
        return self._enqueue("allgather", x, out)

    def abort(self) -> None:
        if self._meeting is not None:
            self._meeting.aborted.add(self._rank)

    def _enqueue(self, name: str, given: Tensor, result: Tensor) -> _Work:
        fake = current()
        if not given.is_cuda or not given.is_contiguous() or not result.is_contiguous():
            raise RuntimeError("Tensors must be CUDA and dense")
        meeting = self._meeting or self._met()
        if self._rank in meeting.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        parts = fake.alias(given), fake.alias(result)
        step = Collective(meeting, self._rank, (name, tuple(given.shape), given.dtype), parts)
        fake.enqueue(f"nccl:{name}", step, [given], [result])
        return _Work()

    def _met(self) -> Meeting:
        """Wait for all ranks, as communicators are made at the first operation. Raises RuntimeError."""
        current().machine.refuse_in_capture("making a communicator")
        self._store.set(f"nccl {self._rank}", "here")
        self._store.wait([f"nccl {rank}" for rank in range(self._size)], self._timeout)
        meetings = current().nccl_meetings
        self._meeting = meetings.setdefault(self._store.path, Meeting(self._size))
        return self._meeting
