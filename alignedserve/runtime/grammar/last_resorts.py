"""Tokens that a mask allows only where it allows no other: ends of an answer that are not wanted yet."""

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int64]


class LastResorts:
    """Takes some tokens out of masks."""

    __slots__ = ("_masks", "_words")

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        """`token_ids`: at least one, each with a bit in every mask."""
        masks: dict[int, int] = {}
        for token_id in token_ids:
            masks[token_id >> 5] = masks.get(token_id >> 5, 0) | 1 << (token_id & 31)
        self._words = np.array(list(masks), np.int64)
        self._masks = np.array(list(masks.values()), np.uint32).view(np.int32)

    def remove_from(self, bits: Bits, rows: IntArray) -> None:
        """Clear these tokens in the masks [rows, words]; a row that would become empty stays as it is."""
        before = bits[rows[:, None], self._words]
        has_any = (before & self._masks).any(axis=1)
        if not has_any.any():  # as at most places in answers
            return
        rows, before = rows[has_any], before[has_any]
        bits[rows[:, None], self._words] = before & ~self._masks
        is_empty = ~bits[rows].any(axis=1)
        bits[rows[is_empty][:, None], self._words] = before[is_empty]
