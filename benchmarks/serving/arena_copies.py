"""Copies to, from and between arenas against plain copies, and what makes them fast, recorded.

python -m benchmarks.serving.arena_copies
Targets, checksums on, 64 MiB and more: 90 % of a plain copy by one thread, and by two what two plain copies reach.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from alignedserve.microbench.transfer.block_moves import BlockMoves
from alignedserve.microbench.transfer.memory_copies import MemoryCopies
from alignedserve.microbench.transfer.peer_process import memory_folder
from alignedserve.microbench.transfer.spec import TransferBenchmarkSpec
from alignedserve.runtime.device.timing import clocked_by_turns
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from benchmarks.support.recording import write_result
from kernels.cpu.block_copies import BlockList, Bytes, copy_blocks, levels

_MEBIBYTES = (4, 64, 256)
_ONE_SIZE = 64  # of the parts
_CREATED_BYTES = 1 << 30
_PIECE_BYTES = 640 * 1024


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    num_rounds = parser.parse_args().rounds
    figures = {
        "copies": _shown(_copies(TransferBenchmarkSpec(mebibytes=_MEBIBYTES, num_rounds=num_rounds))),
        "parts": _shown(_parts(TransferBenchmarkSpec(mebibytes=(_ONE_SIZE,), num_rounds=num_rounds))),
        "creation of 1 GiB": _shown(_creations(max(3, num_rounds // 3))),
    }
    write_result("arena_copies", figures)


def _shown(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    shown = []
    for row in rows:
        print(row, flush=True)
        shown.append(row)
    return shown


class _Case(NamedTuple):
    """Blocks of one size to move, out of a storage of random bytes, and a folder in memory for an arena."""

    shape: str
    moves: BlockMoves
    storage: BlockStorage
    folder: Path


def _cases(spec: TransferBenchmarkSpec) -> Iterator[_Case]:
    for shape, num_blocks in spec.sizes():
        with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
            moves = BlockMoves(spec, shape, num_blocks)
            storage = BlockStorage(moves.layout, num_blocks)
            storage.bytes.random_()
            yield _Case(shape, moves, storage, Path(folder))


def _copies(spec: TransferBenchmarkSpec) -> Iterator[dict[str, Any]]:
    """Offload, fetch and relay of an arena, beside plain copies of contiguous bytes."""
    for case in _cases(spec):
        copies = MemoryCopies(case.moves, case.storage, case.folder)
        yield from map(asdict, copies.rows())
        copies.close()


def _parts(spec: TransferBenchmarkSpec) -> Iterator[dict[str, Any]]:
    """Blocks from a storage into an arena: by each level and kind of store, and as Python did it block by block."""
    for case in _cases(spec):
        moves = case.moves
        arena = Arena.create(case.folder / "pool.arena", moves.layout, case.storage.num_blocks)
        source = BlockList(case.storage.bytes.numpy(), np.array(moves.mine, np.int64))
        ways = _ways(source, BlockList(arena.blocks, np.array(moves.theirs, np.int64)))
        seconds = clocked_by_turns(spec.num_rounds, *ways.values())
        for name, one_s in zip(ways, seconds, strict=True):
            yield {"shape": case.shape, "way": name, "gb_per_s": round(moves.num_bytes / one_s / 1e9, 2)}
        arena.close(unlink=True)


def _ways(source: BlockList, target: BlockList) -> dict[str, Callable[[], object]]:
    ways: dict[str, Callable[[], object]] = {}
    for level in levels():
        for stores in ("streamed", "cached"):
            copy = partial(copy_blocks, source, target, level=level, is_streamed=stores == "streamed")
            ways[f"{level}, {stores}"] = copy
            ways[f"{level}, {stores}, not summed"] = partial(copy, with_digests=False)
    ways["plain copy"] = partial(np.copyto, target.blocks, source.blocks)
    ways["Python, block by block"] = partial(_block_by_block, source, target)
    return ways


def _block_by_block(source: BlockList, target: BlockList) -> list[int]:
    """Copy and sum as before there was a kernel for it: each block in pieces that the caches hold."""
    sums = []
    for read, written in zip(source.block_ids.tolist(), target.block_ids.tolist(), strict=True):
        hasher = xxhash.xxh3_64()
        for piece in _pieces(source.blocks[read]):
            np.copyto(target.blocks[written][piece], source.blocks[read][piece])
            hasher.update(source.blocks[read][piece].data)
        sums.append(hasher.intdigest())
    return sums


def _pieces(block: Bytes) -> Iterator[slice]:
    for start in range(0, len(block), _PIECE_BYTES):
        yield slice(start, start + _PIECE_BYTES)


def _creations(num_rounds: int) -> Iterator[dict[str, Any]]:
    """Taking the memory of an arena: on huge pages by several threads, or page by page, as before."""
    layout = BlockMoves(TransferBenchmarkSpec(), "pocket", 1).layout
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        path = Path(folder) / "pool.arena"

        def create() -> None:
            Arena.create(path, layout, _CREATED_BYTES // layout.block_bytes).close(unlink=True)

        def allocate() -> None:
            file_descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(file_descriptor, 0, _CREATED_BYTES)
            os.close(file_descriptor)
            path.unlink()

        started = time.perf_counter()
        create()  # the first time a hypervisor may have to provide the memory
        yield {"way": "the first", "seconds": round(time.perf_counter() - started, 3)}
        seconds = clocked_by_turns(num_rounds, create, allocate)
        for name, one_s in zip(("huge pages", "page by page"), seconds, strict=True):
            yield {"way": name, "seconds": round(one_s, 3)}


if __name__ == "__main__":
    main()
