"""Speed of copies to, from and between arenas, by threads, against plain copies of as many contiguous bytes.

The blocks are in random order on both sides; the plain copy is numpy's, of one run of bytes for each thread.
"""

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignedserve.core.errors import HandoffRejected
from alignedserve.messages.caches import BlockCopy
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.local_transfer import ShmTransfer, relay
from benchmarks.measuring.results import TransferResult
from benchmarks.transfer.block_moves import GENERATION, BlockMoves
from benchmarks.transfer.spec import TransferBenchmarkSpec

_MOST_THREADS = 2
_MEMORY = Path("/dev/shm")


def memory_rows(spec: TransferBenchmarkSpec) -> Iterator[TransferResult]:
    """Measure every size, one after the other."""
    torch.set_num_threads(1)
    for shape, num_blocks in spec.sizes():
        moves = BlockMoves(spec, shape, num_blocks)
        storage = BlockStorage(moves.layout, num_blocks)
        storage.bytes.random_()
        with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
            copies = MemoryCopies(moves, storage, Path(folder))
            yield from copies.rows()
            copies.close()


class MemoryCopies:
    """Copies of one size of one shape, and plain ones between memory of the same kinds."""

    def __init__(self, moves: BlockMoves, storage: BlockStorage, folder: Path) -> None:
        self._moves = moves
        self._storage = storage
        arenas = [Arena.create(folder / f"{i}.arena", moves.layout, moves.num_blocks) for i in range(3)]
        self._pool, self._buffer, self._plain_arena = arenas
        self._plain_storage = BlockStorage(moves.layout, moves.num_blocks)
        self._threads = ThreadPoolExecutor(_MOST_THREADS)

    def rows(self) -> Iterator[TransferResult]:
        """Measure all three ways by one thread and, where there are cores for them, by two."""
        for num_threads in range(1, min(_MOST_THREADS, num_cores()) + 1):
            yield from self._by(num_threads)

    def close(self) -> None:
        self._threads.shutdown()
        for arena in (self._pool, self._buffer, self._plain_arena):
            arena.close(unlink=True)

    def _by(self, num_threads: int) -> Iterator[TransferResult]:
        moves, arenas = self._moves, (self._pool, self._buffer)
        pool, buffer = (ShmTransfer(self._storage, arena, stamps=True, num_threads=num_threads) for arena in arenas)
        copy = moves.offload(pool)
        stored, plain_stored = self._storage.bytes.numpy(), self._plain_storage.bytes.numpy()
        transport = "shm" if num_threads == 1 else f"shm, {num_threads} threads"

        def result(operation: str, measured: Callable[[], object], source: Any, target: Any) -> TransferResult:
            return moves.result(transport, operation, measured, self._plain_copy(source, target, num_threads))

        yield result("offload", lambda: moves.offload(pool), stored, self._plain_arena.blocks)
        yield result("fetch", lambda: moves.fetch(pool, copy), self._pool.blocks, plain_stored)
        yield result("relay", lambda: _relayed(pool, copy, buffer, moves), self._pool.blocks, self._plain_arena.blocks)

    def _plain_copy(self, source: Any, target: Any, num_threads: int) -> Callable[[], object]:
        halves = (np.array_split(blocks.reshape(-1), num_threads) for blocks in (target, source))
        parts = list(zip(*halves, strict=True))
        if num_threads == 1:
            return lambda: np.copyto(*parts[0])
        return lambda: wait([self._threads.submit(np.copyto, *part) for part in parts])


def _relayed(pool: ShmTransfer, copy: BlockCopy, buffer: ShmTransfer, moves: BlockMoves) -> None:
    if relay(pool, copy, buffer, moves.theirs[::-1], GENERATION + 1) is None:
        raise HandoffRejected("a relay that must hold was refused; the log says why")
