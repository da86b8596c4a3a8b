"""Sums over the requests in a scheduler's table, by the native kernels where they are built.

Each function takes the table as its three stacks of columns (int64, float64, bool; [columns, capacity]) and the number
of its rows. Plain forms stand with their callers in `alignedserve.scheduling`, and give the same to the last bit."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu.native import load_native

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Names = tuple[str, ...]
Stacks = tuple[Ints, Floats, Bools]

_native: Any = load_native("decode_sums")


def is_native(column_names: tuple[Names, Names, Names]) -> bool:
    """Return whether the functions here can be called on a table of these columns."""
    return _native is not None and column_names == _native.REQUEST_COLUMNS


class BlockSizes(NamedTuple):
    """Sizes of blocks, by which tokens are counted in blocks."""

    block_size: int  # tokens
    hidden_ratio: float  # 0.0: no hidden cache


class DecodeSums(NamedTuple):
    """Decodes added up."""

    context_len: int
    longest: int
    hidden_len: int  # of the context lengths, those with a hidden cache
    num_constrained: int  # those with a grammar


class FittingDecodes(NamedTuple):
    """Decodes whose next tokens fit into free blocks, added up."""

    num: int
    num_blocks: int  # that they take
    context_len: int
    longest: int
    hidden_len: int
    num_constrained: int


def decode_sums(stacks: Stacks, num_rows: int, rows: Ints) -> DecodeSums:
    """Add up decodes of these rows."""
    return DecodeSums(*_native.decode_sums(*stacks, num_rows, rows))


def fitting_decodes(
    stacks: Stacks, num_rows: int, rows: Ints, *, at_most: int, num_free: int, sizes: BlockSizes
) -> FittingDecodes:
    """Add up those of these decodes, from the front, that the free blocks hold with one more token each."""
    return FittingDecodes(*_native.fitting_decodes(*stacks, num_rows, rows, at_most, num_free, *sizes))


def growing_rows(stacks: Stacks, num_rows: int, rows: Ints, num_tokens: Ints, sizes: BlockSizes) -> list[bool] | None:
    """Return which of these rows take blocks or come back from the host as they compute `num_tokens`. None if one
    computes more tokens than are known."""
    grows: list[bool] | None = _native.growing_rows(*stacks, num_rows, rows, num_tokens, *sizes)
    return grows


def note_completed(
    stacks: Stacks, num_rows: int, rows: Ints, num_tokens: Ints, *, now: float, duration_s: float
) -> Bools:
    """Note that these rows computed `num_tokens`; return which rows sampled a token. Changes the table."""
    has_sampled = np.empty(len(rows), np.bool_)
    _native.note_completed(*stacks, num_rows, rows, num_tokens, now, duration_s, has_sampled)
    return has_sampled
