"""Speed of lists of blocks between a device and the host, against a plain copy of as many bytes.

To page-locked memory: gathered on the device, one copy over the link in pieces, and the other way round, as swaps do.
To an arena that is registered with the driver, and summed, as workers that share a pool do. Loads nothing that a server
needs.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from alignedserve.runtime.device.streams import streams_of
from alignedserve.runtime.kv.arena_files import arena_folder
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.direct_copies import DirectCopies, HostSide
from alignedserve.runtime.kv.shm_arena import Arena
from benchmarks.measuring.pinned_copies import OFFLOAD, PREFETCH, PinnedLists, lists_at_the_end
from benchmarks.measuring.results import TransferResult, transfer_result
from benchmarks.measuring.turns import Work, medians_by_turns
from benchmarks.transfer.spec import LAYOUTS, TransferBenchmarkSpec
from kernels.cpu.block_copies import BlockList
from lab.gpu_check.host_accelerator import HostAccelerator

PINNED, REGISTERED = "pinned", "registered"


def pinned_rows(spec: TransferBenchmarkSpec, device: torch.device) -> Iterator[TransferResult]:
    """Measure both directions of every size. The plain copies are of contiguous bytes."""
    for shape, num_blocks in spec.sizes():
        layout = LAYOUTS[shape]
        storage = BlockStorage(layout, 2 * num_blocks, device)
        storage.bytes.random_()  # a link or a memory may be faster over zeros
        lists = PinnedLists(storage, streams_of(storage.device), *lists_at_the_end(storage, num_blocks))
        for name in (OFFLOAD, PREFETCH):
            speed = lists.measure(name, spec.num_rounds)
            size = (shape, layout.block_bytes, num_blocks)
            yield transfer_result(size, (PINNED, name), speed.lists_s, speed.plain_s)


def registered_rows(spec: TransferBenchmarkSpec, device: torch.device) -> Iterator[TransferResult]:
    """Measure both directions of every size. Raises RuntimeError when the driver does not take the arena."""
    for shape, num_blocks in spec.sizes():
        layout = LAYOUTS[shape]
        storage = BlockStorage(layout, num_blocks, device)
        storage.bytes.random_()
        with tempfile.TemporaryDirectory(dir=arena_folder()) as folder:
            arena = Arena.create(Path(folder) / "pool.arena", layout, num_blocks)
            accelerator = storage.accelerator or HostAccelerator()
            arena.register(accelerator.driver)
            if not arena.is_registered:
                raise RuntimeError("the arena cannot be registered with the driver; the log says why")
            copies, host = DirectCopies(accelerator), torch.from_numpy(arena.blocks)
            rng = np.random.default_rng(spec.seed)
            mine, blocks = rng.permutation(num_blocks), storage.bytes
            theirs = HostSide(BlockList(arena.blocks, rng.permutation(num_blocks)))
            ways: dict[str, tuple[Work, Work]] = {
                OFFLOAD: (partial(copies.copy_out, blocks, mine, theirs), partial(host.copy_, blocks)),
                PREFETCH: (partial(copies.copy_in, theirs, blocks, mine), partial(blocks.copy_, host)),
            }
            for name, (measured, plain) in ways.items():
                seconds = medians_by_turns(spec.num_rounds, measured, plain)
                yield transfer_result((shape, layout.block_bytes, num_blocks), (REGISTERED, name), *seconds)
            arena.close(unlink=True)
