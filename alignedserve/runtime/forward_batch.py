"""What one forward pass computes: a few tensors, the same whichever sequences they came from."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from alignedserve.runtime.attention import StepAttention


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Token rows: first one per decoding sequence, then the chunks one after another."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64: rows of BlockStorage.key_slots that take the new keys and values
    fresh_blocks: npt.NDArray[np.int64]  # to be zeroed before the pass writes their first slots
    attention: StepAttention
