"""Rewrites blocks of GGUF's types that have no product of their own as blocks of a type that has one.

Whatever such a block holds is a scale times small integers, so that Q8_0 holds the same integers, of 32 values each.
Its scale is a float16: exact for Q5_0 and IQ4_NL, whose scale it is, and within 2^-12 of it for the others, whose scale
is a float16 times an integer. Q3_K has a scale for every 16 values, as Q6_K does, which holds it exactly.
"""

from collections.abc import Callable

import numpy as np

from kernels.weight_blocks.block_values import Bytes, Floats, half_at, unpack_rows

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
