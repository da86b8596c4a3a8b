"""The processes beside a worker's own that have some of its model's experts.

On each layer this process chooses experts, sends every process the rows of its own, multiplies with those that are
here, and adds all results up in the order in which it would have had them alone: the same bits.
"""

import socket
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from alignedserve.process.connected_process import ConnectedProcess
from alignedserve.runtime.engine.experts.expert_spec import HEADER, ExpertSpec, ExpertStart
from alignedserve.runtime.engine.ranks.frames import encode, send_frame, wait_started
from kernels.cpu.rank_exchange import ExchangeBroken

_MODULE = "alignedserve.runtime.engine.experts.expert_process"
_LOST = "a process with experts of this worker has ended, or has not answered in time"
_BUFFER_BYTES = 4 << 20  # of a connection, so that small requests wait for nobody


class ExpertLink:
    """A connection to a process with some experts of every layer; one request at a time."""

    def __init__(self, connection: socket.socket, num_experts: int, timeout_s: float) -> None:
        """`num_experts`: of a layer. `timeout_s`: for which an answer is waited for."""
        self.num_experts = num_experts
        self._connection = connection
        connection.settimeout(timeout_s)
        self._awaited: Tensor | None = None  # the rows of the answer

    def request(self, layer: int, rows: Tensor, counts: Sequence[int]) -> None:
        """Send rows, of each expert so many. Raises ExchangeBroken."""
        assert self._awaited is None, "two requests at a time"
        head = HEADER.pack(layer, len(counts), len(rows)) + np.array(counts, np.int64).tobytes()
        try:
            self._connection.sendall(head)
            self._connection.sendall(_bytes_of(rows))
        except OSError as error:
            raise ExchangeBroken(_LOST) from error
        self._awaited = torch.empty_like(rows)

    def answer(self) -> Tensor:
        """Wait for the results of the rows. Raises ExchangeBroken."""
        rows, self._awaited = self._awaited, None
        assert rows is not None, "an answer to nothing"
        left = _bytes_of(rows)
        try:
            while left:
                got = self._connection.recv_into(left)
                if not got:
                    raise ExchangeBroken(_LOST)
                left = left[got:]
        except OSError as error:
            raise ExchangeBroken(_LOST) from error
        return rows


class ElsewhereOfLayer:
    """See ExpertsElsewhere."""

    def __init__(self, link: ExpertLink, layer: int) -> None:
        self._link, self._layer = link, layer
        self.num_experts = link.num_experts

    def begin(self, rows: Tensor, counts: Sequence[int]) -> None:
        self._link.request(self._layer, rows, counts)

    def results(self) -> Tensor:
        return self._link.answer()


class ExpertGroup:
    """The processes; one that ends breaks every later step, and the worker with it."""

    def __init__(self, spec: ExpertSpec) -> None:
        """Start them; their loading goes on beside this process's, see `wait`. Raises ExchangeBroken."""
        self._processes = [_ExpertProcess(spec, index) for index in range(1, spec.size)]

    def wait(self) -> None:
        for process in self._processes:
            process.wait_started()

    def of_layer(self, layer: int) -> Sequence[ElsewhereOfLayer]:
        return [ElsewhereOfLayer(process.link, layer) for process in self._processes]

    def kill(self) -> None:
        for process in self._processes:
            process.process.kill()

    def close(self) -> None:
        for process in self._processes:
            process.close()


class _ExpertProcess:
    def __init__(self, spec: ExpertSpec, index: int) -> None:
        self._connection, theirs = socket.socketpair()
        for end in (self._connection, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self.process = ConnectedProcess(_MODULE, (theirs,))
        self.link = ExpertLink(self._connection, spec.num_experts(index), spec.timeout_s)
        try:
            send_frame(self._connection, encode(ExpertStart(index, spec)))
        except OSError as error:
            raise ExchangeBroken(_LOST) from error

    def wait_started(self) -> None:
        timeout_s = self._connection.gettimeout()
        self._connection.settimeout(None)  # however long it loads
        wait_started(self._connection, f"{_LOST}, while it was loading")
        self._connection.settimeout(timeout_s)

    def close(self) -> None:
        self._connection.close()
        self.process.end()


def _bytes_of(rows: Tensor) -> memoryview:
    assert rows.is_contiguous(), "one run of memory"
    return rows.view(torch.uint8).numpy().data.cast("B")
