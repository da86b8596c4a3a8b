"""Decode attention with one program per context and key head, for comparison in benchmarks.

The same kernel as `kernels.gpu.attention.decode_attention` without work partitioning: the longest context of a batch
determines its duration, as in the kernels that the papers measured.
"""

import numpy as np
import torch

from kernels.gpu.attention.decode_attention import TILE, DecodeBatch, decode_batch
from kernels.gpu.attention.work_partition import Int64Array, WorkPartition
from kernels.gpu.blocks import BlockTables


def naive_batch(
    tables: BlockTables, lengths: Int64Array, heads: tuple[int, int, int], *, window: int | None = None
) -> DecodeBatch:
    """Build a batch for `paged_decode` with this window. lengths [rows], on the host; `heads`: kv_heads, group,
    head_dim."""
    arrays = [
        torch.from_numpy(array).to(tables.starts.device)
        for array in (lengths.astype(np.int32), *unpartitioned(lengths, window))
    ]
    return decode_batch(tables, arrays[0], arrays[1:], heads)


def unpartitioned(lengths: Int64Array, window: int | None = None) -> WorkPartition:
    begins = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0) // TILE
    bounds = np.arange(len(lengths) + 1, dtype=np.int32)
    return WorkPartition(
        bounds[:-1].copy(), begins.astype(np.int32), (-(-lengths // TILE)).astype(np.int32), bounds, bounds
    )
