"""What one forward pass computes: a few tensors, the same whichever sequences they came from."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Sequences of similar length with one new token each: token rows `first` to `last` (excluded) of the batch."""

    first: int
    last: int
    run_ids: Tensor  # [(last - first) * blocks] int64, rows of BlockStorage.key_runs
    mask: Tensor  # [last - first, 1, 1, blocks * block_size] float32: 0 or -inf
    window_mask: Tensor | None  # the same for windowed layers; None where the window excludes nothing


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Several new tokens of one sequence: token rows `first` to `last` (excluded) of the batch."""

    first: int
    last: int
    context_len: int  # tokens before the chunk and in it
    run_ids: Tensor | None  # int64: all blocks of the context; None when nothing lies before the chunk
    mask: Tensor | None  # [last - first, context_len]; None: causal over the chunk alone
    window_mask: Tensor | None  # the same for windowed layers; None: as `mask`


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Token rows: first one per decoding sequence, shortest context first, then the chunks one after another."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64: rows of BlockStorage.key_slots that take the new keys and values
    fresh_blocks: npt.NDArray[np.int64]  # blocks whose first slots this pass writes; it zeroes them before
    buckets: tuple[DecodeBucket, ...]
    chunks: tuple[ChunkPlan, ...]
