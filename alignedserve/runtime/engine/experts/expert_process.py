"""A process with some of a model's experts: python -m .expert_process SOCKET LIFELINE, started by ExpertGroup.

It ends with its parent: the lifeline is a pipe whose other end no other process has.
"""

import contextlib
import logging
import socket
import sys

import numpy as np
import torch

from alignedserve.core.errors import AlignedServeError
from alignedserve.process.connected_process import end_with_parent
from alignedserve.process.heap import freeze_heap
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.engine.experts.expert_spec import HEADER, ExpertStart, load_share
from alignedserve.runtime.engine.ranks.frames import Started, decode, encode, receive_bytes, receive_frame, send_frame
from alignedserve.runtime.model.weights.feed_forward_weights import LayerExperts
from kernels.cpu.expert_products import native_experts
from kernels.feed_forward import multiplied_by_expert

logger = logging.getLogger(__name__)


@torch.inference_mode()
def answer_requests(connection: socket.socket, experts: LayerExperts, width: int, dtype: torch.dtype) -> None:
    """Multiply what comes with the experts of its layer, until the other end closes. Raises OSError."""
    native = {layer: native_experts(own, width, width) for layer, own in experts.items()}
    while (header := receive_bytes(connection, HEADER.size)) is not None:
        layer, num_counts, num_rows = HEADER.unpack(header)
        counts = receive_bytes(connection, 8 * num_counts)
        rows = receive_bytes(connection, num_rows * width * dtype.itemsize)
        if counts is None or rows is None:
            return
        own = torch.frombuffer(rows, dtype=dtype).view(num_rows, width)
        numbers = np.frombuffer(counts, np.int64).tolist()
        found = multiplied_by_expert(own, numbers, experts[layer], native[layer])
        connection.sendall(found.contiguous().view(torch.uint8).numpy().data.cast("B"))


def main(socket_descriptor: int, lifeline: int) -> int:
    """Serve the worker at the other end of the socket until it closes; returns the process's exit status."""
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
            send_frame(connection, encode(Started.failed(error)))
        return 1
    send_frame(connection, encode(Started()))
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
