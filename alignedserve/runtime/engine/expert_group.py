"""The processes beside a worker's own that have some of its model's experts, whole.

    python -m alignedserve.runtime.engine.expert_group SOCKET LIFELINE

On each layer the worker chooses experts, sends every process the rows of its experts, multiplies with its own experts,
and adds all results up in the order in which it would have them alone: the same bits. A request is a header (layer,
number of counts, number of rows), how many rows each expert has (int64), and the rows as they lie in memory; the answer
is as many rows. A process ends with its parent: no other process has the other end of the lifeline, a pipe."""

import contextlib
import logging
import socket
import struct
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from alignedserve.core.errors import AlignedServeError
from alignedserve.process.connected_process import ConnectedProcess, end_with_parent
from alignedserve.process.heap import freeze_heap
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.engine.ranks.frames import (
    StartAnswer,
    decode,
    encode,
    receive_bytes,
    receive_frame,
    send_frame,
    wait_started,
)
from alignedserve.runtime.model.sharding.tensor_shard import ExpertShare
from alignedserve.runtime.model.weight_files import ModelSpec, load_experts
from alignedserve.runtime.model.weights.feed_forward_weights import ExpertReading, LayerExperts
from kernels.cpu.expert_products import native_experts
from kernels.cpu.rank_exchange import ExchangeBroken
from kernels.feed_forward import multiplied_by_expert

HEADER = struct.Struct("<IIQ")


class ExpertSpec(msgspec.Struct, frozen=True):
    """What each of the processes makes."""

    model: ModelSpec
    size: int  # processes, the worker's own included
    num_threads: int  # of each
    timeout_s: float  # for which an answer is waited for

    def share(self, index: int) -> ExpertShare:
        return ExpertShare(index, self.size)

    def num_experts(self, index: int) -> int:
        experts = self.model.config.experts
        assert experts is not None, "a model without experts"
        return len(self.share(index).experts(experts.num_experts))


class ExpertStart(msgspec.Struct, frozen=True):
    """The first frame to a process."""

    index: int
    spec: ExpertSpec


def load_share(spec: ExpertSpec, index: int) -> LayerExperts:
    """Load the experts of one process, by layer. Raises ModelError."""
    return load_experts(spec.model, ExpertReading(spec.share(index)))


_MODULE = "alignedserve.runtime.engine.expert_group"
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


logger = logging.getLogger(__name__)


@torch.inference_mode()
def answer_requests(connection: socket.socket, experts: LayerExperts, width: int, dtype: torch.dtype) -> None:
    """Multiply what comes with the experts of its layer, until the other end closes. Raises OSError."""
    native = {layer: native_experts(layer_experts, width, width) for layer, layer_experts in experts.items()}
    while (header := receive_bytes(connection, HEADER.size)) is not None:
        layer, num_counts, num_rows = HEADER.unpack(header)
        counts = receive_bytes(connection, 8 * num_counts)
        rows = receive_bytes(connection, num_rows * width * dtype.itemsize)
        if counts is None or rows is None:
            return
        inputs = torch.frombuffer(rows, dtype=dtype).view(num_rows, width)
        numbers = np.frombuffer(counts, np.int64).tolist()
        multiplied = multiplied_by_expert(inputs, numbers, experts[layer], native[layer])
        connection.sendall(multiplied.contiguous().view(torch.uint8).numpy().data.cast("B"))


def main(socket_descriptor: int, lifeline: int) -> int:
    end_with_parent(lifeline)
    connection = socket.socket(fileno=socket_descriptor)
    first = receive_frame(connection)
    if first is None:
        return 0
    start = decode(first, ExpertStart)
    torch.set_num_threads(start.spec.num_threads)
    try:
        experts = load_share(start.spec, start.index)
    except AlignedServeError as error:
        with contextlib.suppress(OSError):  # the worker has failed by itself
            send_frame(connection, encode(StartAnswer.failed(error)))
        return 1
    send_frame(connection, encode(StartAnswer()))
    freeze_heap()
    model = start.spec.model
    try:
        answer_requests(connection, experts, model.config.hidden_size, torch_dtype(model.dtype))
    except OSError:
        logger.info("the worker of these experts has ended")
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
