"""The block formats of GGUF files whose products are computed in place, in plain PyTorch.

A row is cut into blocks of 32 values, or superblocks of 256. A value is scale * quant + minimum, of unsigned integers;
formats without minima subtract a constant from the quant. In the K formats a block's scale and minimum are integers
times a float16 of their superblock.

Worked example: a Q4_0 block with scale 0.5 and the byte 0x3f first holds (15 - 8) * 0.5 = 3.5 at place 0 and
(3 - 8) * 0.5 = -2.5 at place 16.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Each takes uint8 [blocks, num_bytes] -> float32 [blocks, num_values].
_Unpacking = Callable[[Tensor], Tensor]


class BlockFormat(NamedTuple):
    """The layout of one block in a file: a superblock in a K format."""

    num_values: int
    num_bytes: int
    half_places: tuple[int, ...]  # of the float16 numbers among its bytes
    unpack: _Unpacking

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of `width` values. Raises ValueError unless they are whole blocks."""
        if width < 1 or width % self.num_values:
            raise ValueError(f"a row of {width} is not filled by blocks of {self.num_values}")
        return width // self.num_values * self.num_bytes


def dequantize(raw_rows: Tensor, type_name: str) -> Tensor:
    """Unpack raw_rows uint8 [rows, row bytes], as in the file -> float32 [rows, width]. Raises ValueError for a type
    that is not in BLOCK_FORMATS, or rows that are not whole blocks."""
    layout = format_named(type_name)
    blocks = _blocks(raw_rows, layout)
    rows, row_bytes = raw_rows.shape
    return layout.unpack(blocks).reshape(rows, row_bytes // layout.num_bytes * layout.num_values)


def has_finite_scales(raw_rows: Tensor, type_name: str) -> bool:
    """Return whether every float16 among the blocks, and so every value, is a finite number."""
    layout = format_named(type_name)
    # The exponent's bits, all ones in infinities and NaN, are in the second byte.
    exponents = _blocks(raw_rows, layout)[:, [place + 1 for place in layout.half_places]] & 0x7C
    return not bool((exponents == 0x7C).any())


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


def _half(blocks: Tensor, place: int) -> Tensor:
    """Read the float16 number at `place` of each block: [blocks, 1] float32."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Split bytes [..., n] into their low halves, then their high halves: [..., 2 n]."""
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8.0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q4_k(blocks: Tensor) -> Tensor:
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=1)
    quants = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    scaled = (_half(blocks, 0) * scales)[:, :, None] * quants
    return (scaled - (_half(blocks, 2) * minima)[:, :, None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = torch.cat([blocks[:, 128:192].reshape(-1, 2, 32) >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    quants = (low | high << 4).reshape(-1, 16, 16).float() - 32.0
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return (scales[:, :, None] * quants).flatten(1)


# By GGUF's names.
BLOCK_FORMATS = {
    "Q8_0": BlockFormat(32, 34, (0,), _q8_0),
    "Q4_0": BlockFormat(32, 18, (0,), _q4_0),
    "Q4_1": BlockFormat(32, 20, (0, 2), _q4_1),
    "Q4_K": BlockFormat(256, 144, (0, 2), _q4_k),
    "Q6_K": BlockFormat(256, 210, (208,), _q6_k),
}
