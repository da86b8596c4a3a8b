"""The slices of one step on the host: the tokens that they compute, and the slots of these tokens."""

from dataclasses import dataclass

import numpy as np

from alignedserve.runtime.attention.backend import StepAttention
from alignedserve.runtime.attention.sequence_table import IntArray


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Slices of sequences, those that decode first, then the chunks; their tokens lie one after another."""

    attention: StepAttention
    rows: IntArray  # [slices] rows of the sequence table
    counts: IntArray  # [slices] tokens of each
    token_rows: IntArray  # [tokens] rows of the sequence table
    positions: IntArray  # [tokens]
    slots: IntArray  # [tokens], see ForwardBatch


def tokens_of(rows: IntArray, first: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return rows and positions, one after another, of `counts` tokens of each row, from position `first` on."""
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(rows, counts), np.repeat(first, counts) + offsets
