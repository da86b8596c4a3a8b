"""Contexts in blocks, in no order, among slots that hold NaN."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.gpu.blocks import BlockTables, BlockView

NUM_LAYERS, LAYER = 2, 1


class Contexts(NamedTuple):
    """Keys and values of some sequences, plain and in blocks."""

    keys: list[Tensor]  # [length, kv_heads, head_dim] each
    values: list[Tensor]
    lengths: np.ndarray
    view: BlockView
    tables: BlockTables


def contexts(
    rng: np.random.Generator,
    lengths: list[int],
    heads: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Contexts:
    """`heads`: kv_heads, head_dim. Half of the sequences fill their blocks from the end."""
    kv_heads, head_dim = heads
    widths = [-(-length // block_size) for length in lengths]
    blocks = torch.full(
        (sum(widths) + 2, NUM_LAYERS, 2, block_size, kv_heads, head_dim), float("nan"), dtype=dtype, device=device
    )
    free = rng.permutation(len(blocks)).tolist()
    table_starts = np.cumsum(widths) - widths
    entries = np.zeros(sum(widths), np.int32)
    is_reversed = rng.integers(0, 2, len(lengths)).astype(np.int8)
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    all_keys, all_values = [], []
    for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
        entries[table_starts[row] : table_starts[row] + width] = [free.pop() for _ in range(width)]
        keys, values = (torch.randn(length, *heads, generator=generator).to(device, dtype) for _ in range(2))
        tokens = np.arange(length)
        slots = tokens % block_size
        slots = block_size - 1 - slots if is_reversed[row] else slots
        own_blocks = torch.from_numpy(entries[table_starts[row] + tokens // block_size].astype(np.int64))
        blocks[own_blocks, LAYER, 0, torch.from_numpy(slots)] = keys
        blocks[own_blocks, LAYER, 1, torch.from_numpy(slots)] = values
        all_keys.append(keys)
        all_values.append(values)
    arrays = (entries, table_starts.astype(np.int32), is_reversed)
    tables = BlockTables(*(torch.from_numpy(array).to(device) for array in arrays))
    return Contexts(all_keys, all_values, np.array(lengths), BlockView(blocks, LAYER), tables)
