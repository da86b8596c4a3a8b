"""Unpacks blocks to float32, in numpy: where values are looked up or cannot be computed in blocks.

A row is cut into blocks of 32 values, or superblocks of 256 in the K formats, whose blocks have integer scales (and
minima) times a float16 of the superblock. A value is scale * quant, or scale * quant + minimum.

Worked example: a Q5_0 block has scale 0.5 and the byte 0x3f first, with the fifth bit of place 0 set and that of place
16 not: it holds (15 + 16 - 16) * 0.5 = 7.5 at place 0 and (3 - 16) * 0.5 = -6.5 at place 16.

Blocks of types without a product of their own are rewritten as a type that has one. Such a block is a scale times
small integers, so that Q8_0 holds the same integers, of 32 values each. Its scale is a float16: exact for Q5_0 and
IQ4_NL, and within 2^-12 for the others, whose scale is a float16 times an integer. Q3_K has a scale for every 16
values, as Q6_K does, which holds it exactly."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class BlockParts(NamedTuple):
    """Blocks as groups of integers, each with a scale: a value is scale * (quant - zero) + minimum."""

    quants: Bytes  # [blocks, groups, values]
    scales: Floats  # [blocks, groups]
    minima: Floats | None = None  # likewise; None: 0
    zero: int = 0

    def values(self) -> Floats:
        values = self.scales[:, :, None] * (_float32(self.quants) - np.float32(self.zero))
        if self.minima is not None:
            values += self.minima[:, :, None]
        return values.reshape(len(values), -1)


_CHUNK_VALUES = 1 << 22  # so many at a time: intermediate results are several times as large as the values


@np.errstate(invalid="ignore", over="ignore")  # a scale that is not finite gives values that are not
def unpack_rows(raw_rows: Bytes, type_name: str) -> Floats:
    """Return the values [rows, width] float32 of raw rows [rows, bytes of a row]; `type_name` is GGUF's."""
    unpack, block_bytes = _unpacking(type_name)
    num_rows = len(raw_rows)
    if type_name in _PLAIN:
        return unpack(np.ascontiguousarray(raw_rows)).reshape(num_rows, -1)
    blocks = np.ascontiguousarray(raw_rows).reshape(-1, block_bytes)
    step = max(1, _CHUNK_VALUES // 256)
    first = unpack(blocks[:step])
    values = np.empty((len(blocks), first.shape[1]), np.float32)
    values[:step] = first
    for start in range(step, len(blocks), step):
        values[start : start + step] = unpack(blocks[start : start + step])
    return values.reshape(num_rows, -1)


def block_parts(raw_rows: Bytes, type_name: str) -> BlockParts | None:
    """Return raw rows [rows, bytes of a row] as integers and what they are multiplied by; None: this type has none. Of
    all blocks of all rows, one after another."""
    parts = _PARTS.get(type_name)
    if parts is None:
        return None
    parts_of, block_bytes = parts
    return parts_of(np.ascontiguousarray(raw_rows).reshape(-1, block_bytes))


def _unpacking(type_name: str) -> tuple[Callable[[Bytes], Floats], int]:
    parts = _PARTS.get(type_name)
    if parts is None:
        return _UNPACKING.get(type_name) or _of_library(type_name)
    parts_of, block_bytes = parts
    return lambda blocks: parts_of(blocks).values(), block_bytes


def _of_library(type_name: str) -> tuple[Callable[[Bytes], Floats], int]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    number = GGMLQuantizationType[type_name]
    return partial(dequantize, qtype=number), GGML_QUANT_SIZES[number][1]


def _f32(rows: Bytes) -> Floats:
    return rows.view("<f4")


def _f16(rows: Bytes) -> Floats:
    return _float32(rows.view("<f2"))


def _bf16(rows: Bytes) -> Floats:
    return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, None, 2:]), half_at(blocks, 0), zero=8)


def _q4_1(blocks: Bytes) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, None, 4:]), half_at(blocks, 0), half_at(blocks, 2))


def _g4(blocks: Bytes) -> BlockParts:
    scales, minima = (np.ascontiguousarray(blocks[:, first : first + 4]).view("<f4") for first in (0, 4))
    quants = _nibbles(blocks[:, 8:].reshape(len(blocks), -1, 16)).reshape(len(blocks), 1, -1)
    return BlockParts(quants, scales, minima)


def _q5_0(blocks: Bytes) -> BlockParts:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return BlockParts(quants[:, None], half_at(blocks, 0), zero=16)


def _q5_1(blocks: Bytes) -> BlockParts:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return BlockParts(quants[:, None], half_at(blocks, 0), half_at(blocks, 2))


def _q8_0(blocks: Bytes) -> BlockParts:
    return BlockParts(blocks[:, None, 2:] ^ np.uint8(0x80), half_at(blocks, 0), zero=0x80)


def _q4_k(blocks: Bytes) -> BlockParts:
    return _scaled_k(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> BlockParts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    places = np.arange(8, dtype=np.uint8)[None, :, None]
    high = (blocks[:, None, 16:48] >> places) & np.uint8(1)
    return _scaled_k(blocks, low | high << np.uint8(4))


def _q6_k(blocks: Bytes) -> BlockParts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & np.uint8(3)
    quants = (low | high.reshape(-1, 2, 128) << np.uint8(4)).reshape(-1, 16, 16)
    return BlockParts(quants, half_at(blocks, 208) * _float32(blocks[:, 192:208].view(np.int8)), zero=32)


def _scaled_k(blocks: Bytes, quants: Bytes) -> BlockParts:
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    six, four = np.uint8(63), np.uint8(15)
    scales = np.concatenate([low & six, high & four | low >> 6 << 4], axis=1)
    minima = np.concatenate([middle & six, high >> 4 | middle >> 6 << 4], axis=1)
    return BlockParts(quants, half_at(blocks, 0) * scales, -(half_at(blocks, 2) * minima))


def _mxfp4(blocks: Bytes) -> Floats:
    values: Floats = np.ldexp(FLOATS_OF_4_BITS[_nibbles(blocks[:, 1:])], blocks[:, :1].astype(np.int32) - 127)
    return values


def _float32(numbers: npt.NDArray[Any]) -> Floats:
    converted: Floats = numbers.astype(np.float32)
    return converted


def half_at(blocks: Bytes, offset: int) -> Floats:
    return _float32(np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2"))


def _nibbles(raw: Bytes) -> Bytes:
    return np.concatenate([raw & np.uint8(15), raw >> np.uint8(4)], axis=-1)


def _fifth_bits(raw: Bytes) -> Bytes:
    return np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)


_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FLOATS_OF_4_BITS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_PLAIN = ("F32", "F16", "BF16")
_PARTS: dict[str, tuple[Callable[[Bytes], BlockParts], int]] = {
    "Q4_0": (_q4_0, 18),
    "Q4_1": (_q4_1, 20),
    "Q5_0": (_q5_0, 22),
    "Q5_1": (_q5_1, 24),
    "Q8_0": (_q8_0, 34),
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
    "G4_32": (_g4, 24),
    "G4_64": (_g4, 40),
    "G4_128": (_g4, 72),
}
_UNPACKING: dict[str, tuple[Callable[[Bytes], Floats], int]] = {
    "F32": (_f32, 4),
    "F16": (_f16, 2),
    "BF16": (_bf16, 2),
    "MXFP4": (_mxfp4, 17),
}


_CHUNK_ROWS = 256  # at a time: intermediate results are several times as large as the values


def wider_blocks(raw_rows: Bytes, type_name: str) -> Bytes:
    """Return rows [rows, bytes of a row] in blocks of the type that products are computed in; or as they are."""
    if type_name == "Q3_K":
        return _in_chunks(raw_rows, _q6_k_of_q3_k)
    found = _SCALES.get(type_name)
    if found is None:
        return raw_rows
    scales_of, block_bytes = found

    def widen(rows: Bytes) -> Bytes:
        scales = scales_of(rows.reshape(-1, block_bytes)).reshape(-1, 1)
        quants = _integers(unpack_rows(rows, type_name).reshape(-1, 32), scales)
        return np.concatenate([_halves(scales), quants], axis=1).reshape(len(rows), -1)

    return _in_chunks(raw_rows, widen)


def _in_chunks(raw_rows: Bytes, widen: Callable[[Bytes], Bytes]) -> Bytes:
    chunks = range(0, max(1, len(raw_rows)), _CHUNK_ROWS)
    with np.errstate(invalid="ignore", over="ignore"):  # of a scale that is not finite, which is seen afterwards
        return np.concatenate([widen(np.ascontiguousarray(raw_rows[at : at + _CHUNK_ROWS])) for at in chunks])


def _integers(values: Floats, scales: Floats) -> Bytes:
    is_one = np.isfinite(scales) & (scales != 0)
    quants = np.rint(values / np.where(is_one, scales, 1))
    return np.where(is_one, quants, 0).astype(np.int8).view(np.uint8)


def _halves(scales: Floats) -> Bytes:
    return np.ascontiguousarray(scales.astype("<f2")).view(np.uint8)


def _first_half(blocks: Bytes) -> Floats:
    return half_at(blocks, 0)


# --- scales of 32 values, [blocks, 1], or of superblocks, [blocks, 8]


def _iq4_xs(blocks: Bytes) -> Floats:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = blocks[:, 4:8].repeat(2, axis=1) >> np.tile(np.array([0, 4], np.uint8), 4)
    scales: Floats = (low & 15 | (high & 3) << 4).astype(np.float32) - np.float32(32)
    return half_at(blocks, 0) * scales


def _iq2_xxs(blocks: Bytes) -> Floats:
    return half_at(blocks, 0) * (2 * (blocks[:, 9::8] >> 4).astype(np.float32) + 1) / np.float32(8)


def _iq3_xxs(blocks: Bytes) -> Floats:
    return half_at(blocks, 0) * (2 * (blocks[:, 69::4] >> 4).astype(np.float32) + 1) / np.float32(4)


def _iq3_s(blocks: Bytes) -> Floats:
    scales = blocks[:, 106:].repeat(2, axis=1) >> np.tile(np.array([0, 4], np.uint8), 4) & 15
    return half_at(blocks, 0) * (2 * scales.astype(np.float32) + 1)


def _iq1_s(blocks: Bytes) -> Floats:
    numbers = np.ascontiguousarray(blocks[:, 34:]).view("<u2")
    return half_at(blocks, 0) * (2 * (numbers >> 12 & 7).astype(np.float32) + 1) / np.float32(8)


_SCALES: dict[str, tuple[Callable[[Bytes], Floats], int]] = {
    "Q5_0": (_first_half, 22),
    "IQ4_NL": (_first_half, 18),
    "IQ4_XS": (_iq4_xs, 136),
    "IQ3_S": (_iq3_s, 110),
    "IQ3_XXS": (_iq3_xxs, 98),
    "IQ2_XXS": (_iq2_xxs, 66),
    "IQ1_S": (_iq1_s, 50),
}


# --- Q3_K


def _q6_k_of_q3_k(rows: Bytes) -> Bytes:
    blocks = rows.reshape(-1, 110)
    low = blocks[:, 96:104, None] >> np.array([0, 4], np.uint8) & 15
    high = blocks[:, 104:108, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    scales = low.transpose(0, 2, 1).reshape(-1, 16) | high.transpose(0, 2, 1).reshape(-1, 16) << 4
    scales = scales.astype(np.int8) - np.int8(32)
    size = half_at(blocks, 108) * scales
    quants = _integers(unpack_rows(rows, "Q3_K").reshape(-1, 16), size.reshape(-1, 1)).view(np.int8)
    sixes = (quants + np.int8(32)).view(np.uint8).reshape(-1, 2, 4, 32)
    four, two = sixes & 15, sixes >> 4
    packed_low = four[:, :, :2] | four[:, :, 2:] << 4
    packed_high = two[:, :, 0] | two[:, :, 1] << 2 | two[:, :, 2] << 4 | two[:, :, 3] << 6
    parts = [packed_low.reshape(-1, 128), packed_high.reshape(-1, 64), scales.view(np.uint8), blocks[:, 108:]]
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)
