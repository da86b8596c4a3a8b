"""The tokens that sequences compute next, as a step of decodes takes them; by the native kernel where it is built."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu.native import load_native

Ints = npt.NDArray[np.int64]

_native: Any = load_native("next_tokens")


class KnownTokens(NamedTuple):
    """A table of sequences, by row: their tokens, and the blocks of what is computed."""

    token_ids: npt.NDArray[np.int32]  # [rows, context]
    block_tables: Ints  # [rows, blocks]
    num_computed: Ints  # [rows]
    num_tokens: Ints  # [rows] that are known
    is_reversed: npt.NDArray[np.bool_]  # [rows] slots of a block are taken from its end
    block_size: int
    slot_stride: int  # slots from one block to the next


class NextTokens(NamedTuple):
    """One token of each row, and padding behind them."""

    token_ids: Ints
    positions: Ints
    slots: Ints
    are_last: bool  # each is the last known one of its row


def next_tokens(known: KnownTokens, rows: Ints, num_padding: int, scratch_slot: int) -> NextTokens:
    """Return the token that each row computes next; `num_padding` more lie in the scratch slot."""
    if _native is None:
        return plain_next_tokens(known, rows, num_padding, scratch_slot)
    tokens = np.empty((3, len(rows) + num_padding), np.int64)
    *tables, block_size, slot_stride = known
    num_last = _native.next_tokens(*tables, rows, block_size, slot_stride, scratch_slot, tokens)
    return NextTokens(tokens[0], tokens[1], tokens[2], num_last == len(rows))


def plain_next_tokens(known: KnownTokens, rows: Ints, num_padding: int, scratch_slot: int) -> NextTokens:
    positions = known.num_computed[rows]
    columns, offsets = np.divmod(positions, known.block_size)
    offsets = np.where(known.is_reversed[rows], known.block_size - 1 - offsets, offsets)
    slots = known.block_tables[rows, columns] * known.slot_stride + offsets
    nothing = np.zeros(num_padding, np.int64)
    return NextTokens(
        np.concatenate((known.token_ids[rows, positions].astype(np.int64), nothing)),
        np.concatenate((positions, nothing)),
        np.concatenate((slots, nothing + scratch_slot)),
        bool((positions + 1 == known.num_tokens[rows]).all()),
    )
