"""Speed of copies of 2 MiB blocks, in an order of no kind: each checked, in GB/s of what is copied."""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.runtime.device.accelerator import synchronize
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.kv.arena_files import arena_folder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.direct_copies import DirectCopies, HostSide
from alignedserve.runtime.kv.shm_arena import Arena
from kernels.cpu.block_copies import BlockList
from lab.gpu_check.host_accelerator import HostAccelerator

# Of an 8B Llama: 32 layers, 8 heads of 128, bfloat16.
_LAYOUT = BlockLayout(block_size=16, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
_TOY = BlockLayout(block_size=16, num_layers=1, num_kv_heads=1, head_dim=16, dtype="bfloat16")
_NUM_BLOCKS, _TOY_BLOCKS, _NUM_ROUNDS = 128, 8, 5

Row = dict[str, Any]


def measure_links(
    device: torch.device, note: Callable[[dict[str, Any]], None], *, is_toy: bool = False
) -> dict[str, Any]:
    """Return a row of each way; `note` is told after each. A way that does not work is among the failures."""
    figures: dict[str, Any] = {"rows": [], "failures": [], "left_out": []}
    size = (_TOY, _TOY_BLOCKS) if is_toy else (_LAYOUT, _NUM_BLOCKS)
    if device.type != CUDA or torch.cuda.device_count() < 2:
        figures["left_out"].append("from GPU to GPU: there is one, or none")
    for name, ways in (("plain", _plain), ("arena", _arena), ("peer", _peer)):
        try:
            for row in ways(device, *size):
                figures["rows"].append(row)
                note(figures)
        except (RuntimeError, OSError) as error:
            figures["failures"].append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
    return figures


def _row(way: str, num_bytes: int, copy: Callable[[], object], devices: tuple[torch.device, ...]) -> Row:
    seconds = []
    for _ in range(_NUM_ROUNDS + 1):
        for device in devices:
            synchronize(device)
        started_s = time.perf_counter()
        copy()
        for device in devices:
            synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    return {"way": way, "bytes": num_bytes, "gb_per_s": round(num_bytes / min(seconds[1:]) / 1e9, 2)}


def _plain(device: torch.device, layout: BlockLayout, num_blocks: int) -> Iterator[Row]:
    size = num_blocks * layout.block_bytes
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    other = torch.empty_like(source)
    yield _row("within the device", size, partial(other.copy_, source), (device,))
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == CUDA)
    yield _row("to page-locked memory", size, partial(host.copy_, source, non_blocking=True), (device,))
    _require(torch.equal(host, source.cpu()), "to page-locked memory")
    yield _row("from page-locked memory", size, partial(other.copy_, host, non_blocking=True), (device,))
    _require(torch.equal(other.cpu(), host), "from page-locked memory")


def _arena(device: torch.device, layout: BlockLayout, num_blocks: int) -> Iterator[Row]:
    storage = BlockStorage(layout, num_blocks, device)
    storage.bytes.random_()
    before, rng = storage.bytes.clone(), np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=arena_folder()) as folder:
        arena = Arena.create(Path(folder) / "check.arena", layout, num_blocks)
        accelerator = storage.accelerator or HostAccelerator()
        try:
            arena.register(accelerator.driver)
            copies = DirectCopies(accelerator)
            mine, theirs = rng.permutation(num_blocks), HostSide(BlockList(arena.blocks, rng.permutation(num_blocks)))
            name = "a registered arena" if arena.is_registered else "an arena that the driver does not register"
            size = num_blocks * layout.block_bytes
            yield _row(f"to {name}", size, partial(copies.copy_out, storage.bytes, mine, theirs), (device,))
            storage.bytes.zero_()
            yield _row(f"from {name}", size, partial(copies.copy_in, theirs, storage.bytes, mine), (device,))
            _require(torch.equal(storage.bytes, before), "an arena")
        finally:
            arena.close(unlink=True)


def _peer(device: torch.device, layout: BlockLayout, num_blocks: int) -> Iterator[Row]:
    if device.type != CUDA or torch.cuda.device_count() < 2:
        return
    other = torch.device(CUDA, 1 if (device.index or 0) == 0 else 0)
    size = num_blocks * layout.block_bytes
    source: Tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    two = torch.empty(size, dtype=torch.uint8, device=other)
    access = "" if torch.cuda.can_device_access_peer(device, other) else ", by way of the host"
    yield _row(f"{device} to {other}{access}", size, partial(two.copy_, source), (device, other))
    _require(torch.equal(two.cpu(), source.cpu()), "between GPUs")


def _require(is_equal: bool, way: str) -> None:
    if not is_equal:
        raise RuntimeError(f"other bytes arrive: {way}")
