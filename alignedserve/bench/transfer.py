"""How fast blocks move, against moving the same bytes without looking at them.

`shm` and `relay` are compared with a numpy copy of the same blocks from and to the same places, block by block; `gloo`
with one bare send of as many bytes between the same two processes. Both ends of a comparison alternate, so that a load
that changes meets both; medians count.
"""

import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from alignedserve.bench.shapes import SHAPES
from alignedserve.bench.transfer_result import TransferResult
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy
from alignedserve.messages.handshake import Role
from alignedserve.runtime.arena import Arena
from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.links import Identity
from alignedserve.runtime.transfer import Incoming, KVTransfer, Outgoing, ShmTransfer, relay
from alignedserve.runtime.transfers.block_server import BlockServer
from alignedserve.runtime.transfers.group_transfer import GroupTransfer
from alignedserve.runtime.transfers.memory import ArenaBuffer

BLOCK_SIZE = 16
LAYOUTS = {
    "pocket": BlockLayout(BLOCK_SIZE, num_layers=5, num_kv_heads=2, head_dim=64, dtype="float32"),
    **{name: shape.block_layout(BLOCK_SIZE, shape.dtype) for name, shape in SHAPES.items()},
}
_MIB = 1024 * 1024
_SECRET = bytes(32)  # of two processes that live for this measurement


@dataclass(frozen=True, slots=True)
class TransferBenchmarkSpec:
    """What to run. Raises ConfigError naming the field."""

    shapes: tuple[str, ...] = ("pocket", "opt-125m")  # whose blocks; keys of LAYOUTS
    mebibytes: tuple[int, ...] = (4, 64)  # of one request
    num_rounds: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        for shape in self.shapes:
            if shape not in LAYOUTS:
                raise ConfigError(f"shape {shape!r} is none of {', '.join(LAYOUTS)}.")
        if not self.mebibytes or not all(1 <= size <= 4096 for size in self.mebibytes):
            raise ConfigError("mebibytes must be from 1 to 4096.")
        if self.num_rounds < 1:
            raise ConfigError("num_rounds must be at least 1.")


def run_transfer_benchmark(spec: TransferBenchmarkSpec) -> list[TransferResult]:
    """Everything that this machine has, one after the other."""
    torch.set_num_threads(1)
    outcomes: list[TransferResult] = []
    for shape in spec.shapes:
        layout = LAYOUTS[shape]
        for size in spec.mebibytes:
            num_blocks = max(1, size * _MIB // layout.block_bytes)
            with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
                bench = _Bench(spec, shape, num_blocks, Path(folder))
                outcomes += bench.in_shared_memory()
                outcomes += bench.between_processes()
    return outcomes


class _Bench:
    """One size of one shape: a storage with random content, blocks in random order on both sides."""

    def __init__(self, spec: TransferBenchmarkSpec, shape: str, num_blocks: int, folder: Path) -> None:
        self._rounds = spec.num_rounds
        self._shape = shape
        self._layout = LAYOUTS[shape]
        self._num_blocks = num_blocks
        self._folder = folder
        self._storage = BlockStorage(self._layout, num_blocks)
        self._storage_bytes = self._storage.bytes.numpy()
        self._storage_bytes[:] = np.random.default_rng(spec.seed).integers(0, 256, self._storage_bytes.shape, np.uint8)
        order = random.Random(spec.seed)  # noqa: S311  (repeatable, no secret)
        self._mine, self._theirs = ([BlockId(i) for i in range(num_blocks)] for _ in range(2))
        order.shuffle(self._mine)
        order.shuffle(self._theirs)

    def in_shared_memory(self) -> Iterator[TransferResult]:
        arenas = [Arena.create(self._folder / f"{i}.arena", self._layout, self._num_blocks) for i in range(2)]
        pool, buffer = arenas
        transfer = ShmTransfer(self._storage, pool, stamps=True)
        copy = self._offloaded(transfer)
        mine, theirs, stored = self._mine, self._theirs, self._storage_bytes
        onwards = theirs[::-1]
        yield self._result(
            "shm", "offload", lambda: self._offloaded(transfer), _block_copies(stored, mine, pool.blocks, theirs)
        )
        yield self._result(
            "shm", "fetch", lambda: self._fetched(transfer, copy), _block_copies(pool.blocks, theirs, stored, mine)
        )
        yield self._result(
            "shm",
            "relay",
            lambda: _checked(relay(pool, copy, buffer, onwards, 2)),
            _block_copies(pool.blocks, theirs, buffer.blocks, onwards),
        )
        for arena in arenas:
            arena.close(unlink=True)

    def between_processes(self) -> Iterator[TransferResult]:
        with _other_process(self._folder, self._layout, self._num_blocks) as told:
            transfer = GroupTransfer(self._storage, _address(self._folder), identity=_identity(Role.DECODE_WORKER))
            group = _bare_group(self._folder, rank=1)
            flat = torch.zeros(self._num_blocks * self._layout.block_bytes, dtype=torch.uint8)
            copy = self._offloaded(transfer)

            def send() -> None:
                told.send("receive")
                group.send([flat], 0, 0).wait()
                told.recv()

            def receive() -> None:
                told.send("send")
                group.recv([flat], 0, 0).wait()
                told.recv()

            yield self._result("gloo", "offload", lambda: self._offloaded(transfer), send)
            yield self._result("gloo", "fetch", lambda: self._fetched(transfer, copy), receive)
            transfer.close()

    def _offloaded(self, transfer: KVTransfer) -> BlockCopy:
        (runs,) = transfer.offload([Outgoing(self._mine, self._theirs, 1)])
        return BlockCopy(1, self._num_blocks * BLOCK_SIZE, _checked(runs))

    def _fetched(self, transfer: KVTransfer, copy: BlockCopy) -> None:
        assert transfer.fetch([Incoming(copy, self._mine)]) == [True], "a copy that was just written does not hold"

    def _result(
        self, transport: str, operation: str, measured: Callable[[], object], plain: Callable[[], object]
    ) -> TransferResult:
        measured_s, plain_s = _medians(self._rounds, measured, plain)
        num_bytes = self._num_blocks * self._layout.block_bytes
        return TransferResult(
            shape=self._shape,
            block_bytes=self._layout.block_bytes,
            num_blocks=self._num_blocks,
            transport=transport,
            operation=operation,
            gb_per_s=round(num_bytes / measured_s / 1e9, 2),
            plain_gb_per_s=round(num_bytes / plain_s / 1e9, 2),
            share=round(plain_s / measured_s, 3),
        )


def _medians(num_rounds: int, *operations: Callable[[], object]) -> list[float]:
    """Seconds of each, by turns, after one round that warms up."""
    times: list[list[float]] = [[] for _ in operations]
    for _ in range(num_rounds + 1):
        for operation, seen in zip(operations, times, strict=True):
            started_s = time.perf_counter()
            operation()
            seen.append(time.perf_counter() - started_s)
    return [statistics.median(seen[1:]) for seen in times]


def _block_copies(source: Any, source_ids: list[BlockId], target: Any, target_ids: list[BlockId]) -> Callable[[], None]:
    def copy() -> None:
        for read, written in zip(source_ids, target_ids, strict=True):
            np.copyto(target[written], source[read])

    return copy


def _checked(runs: Any) -> Any:
    assert runs is not None, "a transfer that must hold was refused"
    return runs


# --- the other process


@contextmanager
def _other_process(folder: Path, layout: BlockLayout, num_blocks: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_own_blocks, args=(there, folder, layout, num_blocks), daemon=True)
    process.start()
    there.close()  # so that the end of the process is the end of the pipe
    try:
        here.recv()
        yield here
    finally:
        with suppress(OSError):
            here.send("end")
        process.join(10)
        process.kill()
        process.join()
        here.close()


def _own_blocks(told: Connection, folder: Path, layout: BlockLayout, num_blocks: int) -> None:
    """Entry point: a candidate buffer with its block server, and a bare process group beside it."""
    torch.set_num_threads(1)
    arena = Arena.create(folder / "candidates.arena", layout, num_blocks)
    identity = _identity(Role.PREFILL_WORKER)
    server = BlockServer(ArenaBuffer(arena), _address(folder), identity=identity, transports=("gloo",))
    told.send("ready")
    group = _bare_group(folder, rank=0)
    flat = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8)
    while (said := told.recv()) != "end":
        work = group.send([flat], 1, 0) if said == "send" else group.recv([flat], 1, 0)
        work.wait()
        told.send("done")
    server.close()
    arena.close(unlink=True)


def _bare_group(folder: Path, rank: int) -> Any:
    distributed: Any = dist
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=60)
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(distributed.FileStore(str(folder / "store"), 2), rank, 2, options)


def _identity(role: Role) -> Identity:
    return Identity(role, role.value, _SECRET, peer_timeout_s=30.0)


def _address(folder: Path) -> str:
    return f"unix:{folder}/blocks.sock"


def _memory_folder() -> str | None:
    """Where the pool's arena would lie."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
