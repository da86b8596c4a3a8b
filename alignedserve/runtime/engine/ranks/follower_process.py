"""The process of a rank beside the first: python -m .follower_process SOCKET COPIES LIFELINE, started by RankGroup.

It ends with its parent: the lifeline is a pipe whose other end no other process has.
"""

import contextlib
import gc
import logging
import os
import socket
import sys
import threading

import torch

from alignedserve.core.errors import AlignedServeError
from alignedserve.runtime.device.devices import use_device
from alignedserve.runtime.device.streams import streams_of
from alignedserve.runtime.engine.ranks.follower_copies import FollowerCopies, FrameCount
from alignedserve.runtime.engine.ranks.follower_engine import FollowerEngine
from alignedserve.runtime.engine.ranks.frames import Start, Started, decode, encode, receive_frame, send_frame
from alignedserve.runtime.engine.ranks.rank_commands import Command
from alignedserve.runtime.engine.ranks.rank_spec import join, load_shard, make_adapters, make_storage, make_swap_space
from alignedserve.runtime.engine.swap_space import HostCaches
from alignedserve.runtime.lora.adapter_modules import product_shapes

logger = logging.getLogger(__name__)


def main(socket_descriptor: int, copies_descriptor: int, lifeline: int) -> int:
    """Follow the rank at the other end of the sockets until it closes; returns the process's exit status."""
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    connection = socket.socket(fileno=socket_descriptor)
    first = receive_frame(connection)
    if first is None:
        return 0
    start = decode(first, Start)
    try:
        engine, swap_space = _make_engine(start)
        adapters = make_adapters(start.spec, start.rank)
    except AlignedServeError as error:
        with contextlib.suppress(OSError):  # the first rank has failed by itself
            send_frame(connection, encode(Started(type(error).__name__, str(error))))
        return 1
    send_frame(connection, encode(Started()))
    performed = FrameCount()
    copies = FollowerCopies(socket.socket(fileno=copies_descriptor), engine.storage, performed)
    threading.Thread(target=copies.follow, name="copies", daemon=True).start()
    engine.record_graphs(product_shapes(engine.model.config) if start.spec.lora.is_enabled else ())
    gc.collect()
    gc.freeze()
    while (payload := receive_frame(connection)) is not None:
        for command in decode(payload, list[Command]):
            engine.perform(command, swap_space, adapters)
        performed.add()
    return 0


def _make_engine(start: Start) -> tuple[FollowerEngine, HostCaches]:
    spec, rank = start.spec, start.rank
    torch.set_num_threads(spec.num_threads)
    device = spec.device(rank)
    use_device(device)
    collectives = join(spec, rank, start.meeting)
    storage = make_storage(spec, rank, start.meeting)
    for descriptor in start.meeting.descriptors:
        os.close(descriptor)
    streams = streams_of(device)
    engine = FollowerEngine(
        model=load_shard(spec, collectives),
        storage=storage,
        max_sequences=spec.max_sequences,
        max_context_len=spec.max_context_len,
        attention=spec.attention,
        streams=streams,
    )
    return engine, make_swap_space(spec, engine, streams, storage)


def _end_with_parent(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
