"""Contexts in blocks, in no order, among slots that hold NaN."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cache_rows import dequantise_float8_rows, int8_row_width, quantise_float8_rows
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
    *,
    is_float8: bool = False,
    is_shared: bool = False,
) -> Contexts:
    """`heads`: kv_heads, head_dim. Half of the sequences fill their blocks from the end. `is_float8`: the cache is;
    keys and values are those that it holds. `is_shared`: keys are the values."""
    kv_heads, head_dim = heads
    widths = [-(-length // block_size) for length in lengths]
    shape = (sum(widths) + 2, NUM_LAYERS, 1 if is_shared else 2, block_size)
    if is_float8:
        slot_width = int8_row_width(kv_heads, head_dim)
        blocks = torch.full((*shape, slot_width), 255, dtype=torch.uint8, device=device)  # NaN, scales as well
    else:
        blocks = torch.full((*shape, kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
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
        for index, own in enumerate((keys, values)[: blocks.shape[2]]):
            blocks[own_blocks, LAYER, index, torch.from_numpy(slots)] = quantise_float8_rows(own) if is_float8 else own
        if is_float8:
            keys, values = (_as_cached(own) for own in (keys, values))
        all_keys.append(keys)
        all_values.append(keys if is_shared else values)
    arrays = (entries, table_starts.astype(np.int32), is_reversed)
    tables = BlockTables(*(torch.from_numpy(array).to(device) for array in arrays))
    return Contexts(all_keys, all_values, np.array(lengths), BlockView(blocks, LAYER), tables)


def _as_cached(heads: Tensor) -> Tensor:
    """Return what a cache of FP8 holds of heads [tokens, kv_heads, head_dim], float32."""
    out = torch.empty((len(heads), heads.shape[1] * heads.shape[2]), device=heads.device)
    return dequantise_float8_rows(quantise_float8_rows(heads), heads.shape[1], out).view(heads.shape)
