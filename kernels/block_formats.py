"""Layouts of the blocks whose products are computed in place; `block_values` unpacks them.

Those of GGUF files, by GGUF's names; and G4_32, G4_64 and G4_128, of 4 bits with a float32 scale and minimum for every
32, 64 or 128 values, for weights in groups whose scales or zero points no other block holds exactly. MXFP4 has a power
of two for every 32 floats of 4 bits.

GPUs multiply by groups of numbers (`kernels.grouped_linear`): the values of a block, whose scales and minima become
float32. Values of 4 bits stay so, in groups of 32; the integers of Q8_0, and of Q6_K in groups of 16, take a byte."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.block_values import BlockParts, block_parts, unpack_rows
from kernels.grouped_linear import GroupedWeight, Numbers

_NO_EXPONENT = 255


class BlockFormat(NamedTuple):
    """The layout of one block in a file: a superblock in a K format."""

    num_values: int
    num_bytes: int
    scale_places: tuple[int, ...]  # of the float16 (G formats: float32; MXFP4: a power of two) numbers among its bytes
    scale_bytes: int = 2

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of `width` values. Raises ValueError unless they are whole blocks."""
        if width < 1 or width % self.num_values:
            raise ValueError(f"a row of {width} is not filled by blocks of {self.num_values}")
        return width // self.num_values * self.num_bytes


def dequantize(raw_rows: Tensor, type_name: str) -> Tensor:
    """Unpack raw_rows uint8 [rows, row bytes], as in the file -> float32 [rows, width]. Raises ValueError for a type
    that is not in BLOCK_FORMATS, or rows that are not whole blocks."""
    layout = format_named(type_name)
    _blocks(raw_rows, layout)
    if not len(raw_rows):
        return torch.empty(0, raw_rows.shape[1] // layout.num_bytes * layout.num_values)
    return torch.from_numpy(unpack_rows(raw_rows.numpy(), type_name))


def has_finite_scales(raw_rows: Tensor, type_name: str) -> bool:
    """Return whether every scale and minimum among the blocks is a finite number. Then every value is one too, but for
    G formats, whose float32 scale times 15 may be too large."""
    layout = format_named(type_name)
    if layout.scale_bytes == 1:  # an exponent; the last one is no number
        return not bool((_blocks(raw_rows, layout)[:, layout.scale_places[0]] == _NO_EXPONENT).any())
    dtype = torch.float16 if layout.scale_bytes == 2 else torch.float32
    blocks = _blocks(raw_rows, layout)
    places = [scale_place + byte for scale_place in layout.scale_places for byte in range(layout.scale_bytes)]
    return bool(blocks[:, places].view(dtype).isfinite().all())


def format_named(type_name: str) -> BlockFormat:
    """Look a type up by its GGUF name. Raises ValueError for one that is not in BLOCK_FORMATS."""
    layout = BLOCK_FORMATS.get(type_name)
    if layout is None:
        raise ValueError(f"no block format {type_name!r}: there are {', '.join(BLOCK_FORMATS)}")
    return layout


def _blocks(raw_rows: Tensor, layout: BlockFormat) -> Tensor:
    if raw_rows.ndim != 2 or raw_rows.dtype != torch.uint8 or raw_rows.shape[1] % layout.num_bytes:
        raise ValueError(f"not rows of blocks of {layout.num_bytes} bytes: {raw_rows.dtype} {tuple(raw_rows.shape)}")
    return raw_rows.reshape(-1, layout.num_bytes)


BLOCK_FORMATS = {
    "Q8_0": BlockFormat(32, 34, (0,)),
    "Q4_0": BlockFormat(32, 18, (0,)),
    "Q4_1": BlockFormat(32, 20, (0, 2)),
    "Q4_K": BlockFormat(256, 144, (0, 2)),
    "Q6_K": BlockFormat(256, 210, (208,)),
    "G4_32": BlockFormat(32, 24, (0, 4), 4),
    "G4_64": BlockFormat(64, 40, (0, 4), 4),
    "G4_128": BlockFormat(128, 72, (0, 4), 4),
    "MXFP4": BlockFormat(32, 17, (0,), 1),
}


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
