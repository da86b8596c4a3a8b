"""Blocks as groups of numbers, by which GPUs multiply: see `kernels.narrow.grouped_linear`.

The values are those of the blocks, whose scales and minima become float32. Those of 4 bits stay so, in groups of 32;
the integers of Q8_0, and of Q6_K in groups of 16, take a byte each.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.narrow.grouped_linear import GroupedWeight, Numbers
from kernels.weight_blocks.block_formats import format_named
from kernels.weight_blocks.block_values import BlockParts, block_parts

_MXFP4 = "MXFP4"
_OF_4_BITS = ("Q4_0", "Q4_1", "Q4_K", "G4_32", "G4_64", "G4_128")


def grouped_blocks(raw_rows: Tensor, type_name: str) -> GroupedWeight:
    """Return the weight of raw rows, uint8 [rows, bytes of a row] on the host, of a type in BLOCK_FORMATS."""
    num_rows = len(raw_rows)
    if type_name == _MXFP4:
        blocks = raw_rows.view(num_rows, -1, format_named(type_name).num_bytes)
        return GroupedWeight(Numbers.MXFP4, blocks[..., 1:].flatten(1), blocks[..., 0].contiguous(), None)
    parts = block_parts(raw_rows.numpy(), type_name)
    assert parts is not None, f"{type_name} in groups"
    scales = _by_row(parts.scales, num_rows)
    minima = None if parts.minima is None else _by_row(parts.minima, num_rows)
    zeros = torch.full(scales.shape, parts.zero, dtype=torch.uint8) if minima is None else None
    is_of_4_bits = type_name in _OF_4_BITS
    words = torch.from_numpy(_halves(parts) if is_of_4_bits else parts.quants).reshape(num_rows, -1)
    numbers = Numbers.INT4 if is_of_4_bits else Numbers.INT8
    return GroupedWeight(numbers, words, scales, zeros, minima=minima)


def _by_row(numbers: np.ndarray, num_rows: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).reshape(num_rows, -1)


def _halves(parts: BlockParts) -> np.ndarray:
    half = parts.quants.shape[-1] // 2
    return parts.quants[..., :half] | parts.quants[..., half:] << np.uint8(4)
