"""The slices of one step on the host: the tokens that they compute, and the slots of these tokens."""

from dataclasses import dataclass

from alignedserve.runtime.attention.backend import StepAttention
from alignedserve.runtime.attention.sequence_table import IntArray


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Slices of sequences: decodes first, then chunks; their tokens lie one after another."""

    attention: StepAttention
    rows: IntArray  # [slices] rows of the sequence table
    counts: IntArray  # [slices] tokens of each
    token_rows: IntArray  # [tokens] rows of the sequence table
    positions: IntArray  # [tokens]
    slots: IntArray  # [tokens], see ForwardBatch
