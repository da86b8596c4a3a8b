"""The tensors of one forward pass, the same whichever sequences they came from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from alignedserve.core.ids import BlockId
from alignedserve.runtime.attention.backend import StepAttention
from alignedserve.runtime.engine.hidden_pass import HiddenRows
from alignedserve.runtime.engine.last_tokens import LastTokenRows
from kernels.device_lora import DeviceRows
from kernels.lora import AdapterRows


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Token rows: first one per decoding sequence, then the chunks one after another."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64: rows of key_slots, of the storage or of `hidden`, that take the new keys and values
    # Where attention reads every slot of a block, zeroed before the pass writes:
    fresh_blocks: npt.NDArray[np.int64]
    unclean_tails: Sequence[tuple[BlockId, int]]  # of these blocks, the slots from this one on
    attention: StepAttention
    hidden: HiddenRows | None = None  # None: every sequence has keys and values in its blocks
    last: LastTokenRows | None = None  # None: the last layer computes all token rows to the end
    adapters: AdapterRows | DeviceRows | None = None  # None: no token row has one
