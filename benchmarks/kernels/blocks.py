"""Benchmarks of the kernels that copy lists of blocks."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.cases import TORCH, TRITON, KernelCase, KernelSetup

_BLOCK_SIZE = 16
_LISTED_BYTES = 512 << 20
_TOY_BLOCKS = 3


def block_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    yield list(_block_lists(setup))


def _listed_blocks(setup: KernelSetup) -> tuple[Tensor, Tensor]:
    config = setup.config
    shape = (2 * config.num_layers, _BLOCK_SIZE, config.kv_width)
    block_bytes = int(np.prod(shape)) * setup.dtype.itemsize
    count = _TOY_BLOCKS if setup.is_toy else max(1, _LISTED_BYTES // block_bytes)
    blocks = torch.empty((2 * count, *shape), dtype=setup.dtype, device=setup.device).normal_()
    return blocks, _in_no_order(2 * count, setup.device)[:count]


def _in_no_order(count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).permutation(count)).to(device)


def _block_lists(setup: KernelSetup) -> Iterator[KernelCase]:
    blocks, ids = _listed_blocks(setup)
    rows = blocks.view(len(blocks), -1).view(torch.uint8)
    staging = torch.empty((len(ids), rows.shape[1]), dtype=torch.uint8, device=setup.device)
    words, staged_words = rows.view(torch.int64), staging.view(torch.int64)
    case, num_bytes = f"{len(ids)} x {rows.shape[1] / 1024:g} KiB", 2 * staging.numel()
    gather, scatter = (
        partial(KernelCase, kernel, case, num_bytes=num_bytes) for kernel in ("gather blocks", "scatter blocks")
    )
    kernels = setup.kernels("block_copies")
    yield gather(TORCH, lambda: torch.index_select(words, 0, ids, out=staged_words))
    if kernels is not None:
        yield gather(TRITON, lambda: kernels.gather_blocks(rows, ids, staging))
    yield scatter(TORCH, lambda: words.index_copy_(0, ids, staged_words))
    if kernels is not None:
        yield scatter(TRITON, lambda: kernels.scatter_blocks(staging, rows, ids))
