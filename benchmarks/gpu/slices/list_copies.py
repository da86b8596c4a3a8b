"""Lists of blocks to a registered arena and back, by size: gathered on the GPU first, or by one call of the driver.

Each way moves 64 MiB of blocks in no order; one plain copy of as many contiguous bytes stands beside it. And after
which share of a list's time the driver's call returns: swaps are enqueued by the thread that computes.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.device.cuda_driver import RowRuns
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.device.streams import streams_of
from alignedserve.runtime.kv.arena_files import arena_folder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.direct_copies import DirectCopies, HostSide
from alignedserve.runtime.kv.shm_arena import Arena
from benchmarks.measuring.turns import medians_by_turns
from kernels.cpu.block_copies import BlockList
from lab.gpu_check.host_accelerator import HostAccelerator

_LAYERS = (1, 2, 4, 8, 16, 32, 64, 128)  # of 16 KiB in a block
_BYTES, _TOY_BYTES = 64 << 20, 1 << 20
_ROUNDS = 5
_WAYS = {"gathered": 1 << 40, "listed": 0}  # blocks from so many bytes on go straight


def measure_lists(
    device: torch.device, *, is_toy: bool, on_measured: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Return GB/s of each way and size; `on_measured` sees them after each size."""
    rows: list[dict[str, Any]] = []
    for num_layers in _LAYERS[:2] if is_toy else _LAYERS:
        layout = BlockLayout(block_size=16, num_layers=num_layers, num_kv_heads=2, head_dim=128, dtype="bfloat16")
        rows.append(_measure(device, layout, (_TOY_BYTES if is_toy else _BYTES) // layout.block_bytes))
        on_measured({"rows": rows})
    return {"rows": rows}


def _measure(device: torch.device, layout: BlockLayout, num_blocks: int) -> dict[str, Any]:
    storage, rng = BlockStorage(layout, num_blocks, device), np.random.default_rng(0)
    storage.bytes.random_()
    accelerator = storage.accelerator or HostAccelerator()
    with tempfile.TemporaryDirectory(dir=arena_folder()) as folder:
        arena = Arena.create(Path(folder) / "pool.arena", layout, num_blocks)
        try:
            arena.register(accelerator.driver)
            mine, theirs = rng.permutation(num_blocks), HostSide(BlockList(arena.blocks, rng.permutation(num_blocks)))
            host = torch.empty(storage.bytes.shape, dtype=torch.uint8, pin_memory=device.type == CUDA)
            works: dict[str, Callable[[], object]] = {"plain": partial(host.copy_, storage.bytes)}
            for name, least in _WAYS.items():
                copies = DirectCopies(accelerator, least_straight_bytes=least)
                works[f"{name}, out"] = partial(copies.copy_out, storage.bytes, mine, theirs)
                works[f"{name}, in"] = partial(copies.copy_in, theirs, storage.bytes, mine)
            seconds = medians_by_turns(_ROUNDS, *works.values())
            returned = _returned(storage, torch.from_numpy(arena.blocks))
        finally:
            arena.close(unlink=True)
    size = num_blocks * layout.block_bytes
    rates = {name: size / taken / 1e9 for name, taken in zip(works, seconds, strict=True)}
    size_of = {"block_bytes": layout.block_bytes, "num_blocks": num_blocks}
    return {**size_of, "gb_per_s": rates, "share_until_returned": returned}


def _returned(storage: BlockStorage, host: torch.Tensor) -> float:
    stream, rng = streams_of(storage.device).stream("lists"), np.random.default_rng(1)
    shares = []
    for _ in range(_ROUNDS + 1):
        runs = RowRuns.of(rng.permutation(len(host)), rng.permutation(len(host)))
        began_s = time.perf_counter()
        stream.copy_out_runs(storage.bytes, host, runs)
        returned_s = time.perf_counter()
        stream.record().synchronize()
        shares.append((returned_s - began_s) / (time.perf_counter() - began_s))
    return statistics.median(shares[1:])
