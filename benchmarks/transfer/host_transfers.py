"""Speed of block transfers between processes, against moving the same bytes without looking at them.

Copies through shared memory (`memory_copies`) are compared with a plain copy of as many contiguous bytes, `gloo` with
one bare send of as many bytes between the same two processes. Both ends of a comparison alternate, so that a load that
changes meets both; medians count.
"""

import tempfile
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from alignedserve.core.block_layout import BlockLayout
from alignedserve.messages.handshake import Role
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_server import BlockServer
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.kv.transfers.process_pair import open_channel
from alignedserve.runtime.kv.transfers.requests import ChannelTransfer
from benchmarks.measuring.results import TransferResult
from benchmarks.transfer.block_moves import BlockMoves
from benchmarks.transfer.memory_copies import MemoryCopies
from benchmarks.transfer.peer_process import END, address, identity, memory_folder, peer_process
from benchmarks.transfer.spec import TransferBenchmarkSpec


def host_rows(spec: TransferBenchmarkSpec) -> Iterator[TransferResult]:
    """Measure every way between processes without a device, one after the other."""
    torch.set_num_threads(1)
    for shape, num_blocks in spec.sizes():
        with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
            bench = _HostTransferBenchmark(BlockMoves(spec, shape, num_blocks), Path(folder), spec.seed)
            yield from bench.in_shared_memory()
            yield from bench.between_processes()


class _HostTransferBenchmark:
    """One size of one shape: a storage with random content."""

    def __init__(self, moves: BlockMoves, folder: Path, seed: int) -> None:
        self._moves = moves
        self._folder = folder
        self._storage = BlockStorage(moves.layout, moves.num_blocks)
        stored = self._storage.bytes.numpy()
        stored[:] = np.random.default_rng(seed).integers(0, 256, stored.shape, np.uint8)

    def in_shared_memory(self) -> Iterator[TransferResult]:
        copies = MemoryCopies(self._moves, self._storage, self._folder)
        yield from copies.rows()
        copies.close()

    def between_processes(self) -> Iterator[TransferResult]:
        moves = self._moves
        with peer_process(_own_blocks, self._folder, moves.layout, moves.num_blocks) as connection:
            transfer = ChannelTransfer(self._storage, address(self._folder), identity=identity(Role.DECODE_WORKER))
            group = _bare_group(self._folder, rank=1)
            flat = torch.zeros(moves.num_bytes, dtype=torch.uint8)
            copy = moves.offload(transfer)

            def send() -> None:
                connection.send("receive")
                group.send([flat], 0, 0).wait()
                connection.recv()

            def receive() -> None:
                connection.send("send")
                group.recv([flat], 0, 0).wait()
                connection.recv()

            yield moves.result("gloo", "offload", lambda: moves.offload(transfer), send)
            yield moves.result("gloo", "fetch", lambda: moves.fetch(transfer, copy), receive)
            transfer.close()


# --- the other process


def _own_blocks(connection: Connection, folder: Path, layout: BlockLayout, num_blocks: int) -> None:
    torch.set_num_threads(1)
    arena = Arena.create(folder / "candidates.arena", layout, num_blocks)
    own = identity(Role.PREFILL_WORKER)
    server = BlockServer(
        ArenaBuffer(arena), address(folder), identity=own, transports=("gloo",), open_channel=open_channel
    )
    connection.send("ready")
    group = _bare_group(folder, rank=0)
    flat = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8)
    while (said := connection.recv()) != END:
        work = group.send([flat], 1, 0) if said == "send" else group.recv([flat], 1, 0)
        work.wait()
        connection.send("done")
    server.close()
    arena.close(unlink=True)


def _bare_group(folder: Path, rank: int) -> Any:
    distributed: Any = dist
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=60)
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(distributed.FileStore(str(folder / "store"), 2), rank, 2, options)
