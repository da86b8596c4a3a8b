"""Blocks between two workers by pairs of ranks, as far as one GPU shows it: all ranks are in one process, on one GPU.

Each rank lends a buffer of its parts, and the rank of the same number of the other worker reads and writes it. What is
not shown: a link between two GPUs, and mapping between processes, which `pytest tests/contract -m gpu` shows.
"""

import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import ArenaOffered, BlockCopy
from alignedserve.messages.handshake import Role
from alignedserve.process.links import Identity
from alignedserve.runtime.device.accelerator import accelerator_of
from alignedserve.runtime.device.host_accelerator import HostAccelerator
from alignedserve.runtime.engine.ranks.follower_copies import FollowerCopies, FrameCount
from alignedserve.runtime.engine.ranks.group_copies import GroupCopies
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.copy_lanes import CopyLanes
from alignedserve.runtime.kv.device_lender import DeviceLender
from alignedserve.runtime.kv.shm_arena import ArenaPart
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.open_channel import open_channel
from alignedserve.runtime.kv.transfers.ranked_transfer import PartsLoan, PartsOffer, RankedTransfer
from alignedserve.runtime.kv.transfers.registry import open_transfer

_WAY, _PEER = "cuda_ipc", "lender"
_GENERATION, _NUM_TURNS = 5, 5


class _Worker(NamedTuple):
    storages: list[BlockStorage]  # of each rank
    copies: GroupCopies  # of those beside the first
    identity: Identity


def measure_pairs(device: torch.device, *, is_toy: bool) -> dict[str, dict[str, float]]:
    """Return the median seconds of an offload and a fetch of as many bytes by one rank and by two.

    Raises AssertionError when other bytes arrive than were sent.
    """
    whole = BlockLayout(16, 4, 4, 16, "float32") if is_toy else BlockLayout(16, 64, 8, 128, "bfloat16")
    num_blocks = 8 if is_toy else 512
    seconds = {}
    for size in (1, 2):
        layout = ArenaPart(0, size).of(whole)
        with _pair(layout, num_blocks, size, device) as (reader, transfer):
            seconds[f"{size} ranks"] = _measured(reader, transfer, num_blocks, device)
    return seconds


def _measured(reader: _Worker, transfer: RankedTransfer, num_blocks: int, device: torch.device) -> dict[str, float]:
    half = num_blocks // 2
    sources, targets = (tuple(map(BlockId, part)) for part in (range(half), range(half, 2 * half)))
    places = tuple(map(BlockId, reversed(range(half))))  # no two are neighbours in order: each is a copy of its own
    request = OffloadRequest(sources, places, _GENERATION)
    (runs,) = transfer.offload([request])
    assert runs is not None, "an offload was refused"
    copy = BlockCopy(_GENERATION, half * reader.storages[0].layout.block_size, runs)
    assert transfer.fetch([FetchRequest(copy, targets)]) == [True], "what arrived does not verify"
    for storage in reader.storages:
        assert torch.equal(storage.bytes[:half], storage.bytes[half : 2 * half]), "other bytes arrived than were sent"
    return {
        "offload": _median(lambda: transfer.offload([request])),
        "fetch": _median(lambda: transfer.fetch([FetchRequest(copy, targets)])),
    }


def _median(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_NUM_TURNS):
        began_s = time.perf_counter()
        work()  # which waits for the device
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


@contextmanager
def _pair(
    layout: BlockLayout, num_blocks: int, size: int, device: torch.device
) -> Iterator[tuple[_Worker, RankedTransfer]]:
    """Start two workers, and open the transfer of one to what the other lends."""
    lanes = CopyLanes(accelerator_of(device) or HostAccelerator())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lender, reader = (
            stack.enter_context(_worker(name, layout, num_blocks, size, lanes)) for name in (_PEER, "reader")
        )
        first = lender.storages[0]
        buffer = DeviceLender(layout, first.part, lanes, num_blocks).lend(num_blocks)
        server = BlockServer(
            buffer, f"unix:{folder}/0", identity=lender.identity, transports=(_WAY,), open_channel=open_channel
        )
        stack.callback(server.close)
        addresses = tuple(f"unix:{folder}/{rank}" for rank in range(1, size))
        lender.copies.lend("reader", PartsLoan(lender.identity, num_blocks, num_blocks, (_WAY,), addresses))
        whole = first.part.whole(layout)
        offered = ArenaOffered(
            "",
            num_blocks,
            whole.block_bytes,
            whole.digest().hex(),
            served_at=server.address,
            transports=(_WAY,),
            num_ranks=size,
            rank_addresses=addresses,
        )
        own = open_transfer(offered, reader.storages[0], identity=reader.identity, stamps=True, transport=_WAY)
        transfer = RankedTransfer(own, reader.copies, _PEER)
        stack.callback(transfer.close)
        reader.copies.open(_PEER, PartsOffer(offered, reader.identity, True, _WAY))
        yield reader, transfer


@contextmanager
def _worker(name: str, layout: BlockLayout, num_blocks: int, size: int, lanes: CopyLanes) -> Iterator[_Worker]:
    storages = []
    for rank in range(size):
        storage = BlockStorage(layout, num_blocks, lanes.accelerator.device, part=ArenaPart(rank, size))
        storage.lanes = lanes
        storage.bytes.random_()
        storages.append(storage)
    pairs = [socket.socketpair() for _ in range(1, size)]
    threads = [
        threading.Thread(target=FollowerCopies(theirs, storage, FrameCount()).follow)
        for (_, theirs), storage in zip(pairs, storages[1:], strict=True)
    ]
    for thread in threads:
        thread.start()
    copies = GroupCopies([ours for ours, _ in pairs], lambda: 0)
    try:
        yield _Worker(storages, copies, Identity(Role.DECODE_WORKER, name, b"one measurement"))
    finally:
        copies.end()
        for thread in threads:
            thread.join()
