"""The tensors of one forward pass, the same whichever sequences they came from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.core.ids import BlockId
from alignedserve.runtime.attention.backend import AttentionPlanner, StepAttention
from alignedserve.runtime.attention.ring_tables import RingRows
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable
from alignedserve.runtime.engine.forward.hidden_pass import HiddenRows
from alignedserve.runtime.pictures import PictureRows
from kernels.adapters.device_lora import DeviceRows
from kernels.adapters.lora import AdapterRows
from kernels.states.device_rows import DeviceStateRows
from kernels.states.state_rows import StateRows


class LastTokenRows(NamedTuple):
    """The token rows of a forward pass that its last layer computes to the end."""

    token_rows: Tensor  # [rows] int64
    attention: StepAttention  # their own on the last layer: each decodes, in this order


class LastTokens(NamedTuple):
    """The slices of one step that reach their sequences' last known tokens, on the host.

    A chunk of a prompt asks for the logits of one token, or of none while more of the prompt follows. So on the last
    layer the other tokens have no queries, no attention and no feed-forward part: of twelve layers' products of a
    prompt that spares a sixteenth. Each token that is left attends as one that decodes: its keys and values are in its
    blocks by then.
    """

    rows: IntArray  # [slices] rows of the sequence table
    token_rows: IntArray  # [slices] of their last tokens
    attention: StepAttention

    def to_rows(self) -> LastTokenRows:
        return LastTokenRows(torch.from_numpy(self.token_rows), self.attention)


class LastTokenContexts:
    """Contexts that count as computed up to their last known token, whatever the table says: see Contexts."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self.block_size = table.block_size
        self.block_tables = table.block_tables  # the table's own arrays
        self.is_reversed = table.is_reversed
        self.version = table.version
        self.num_computed = np.zeros_like(table.num_tokens)

    def update(self) -> None:
        self.version = self._table.version
        np.subtract(self._table.num_tokens, 1, out=self.num_computed)


class LastTokenPlanner:
    """Plans the attention of the last layer for tokens whose logits are needed."""

    def __init__(self, contexts: LastTokenContexts, planner: AttentionPlanner) -> None:
        self._contexts = contexts
        self._planner = planner

    def plan(self, rows: IntArray, token_rows: IntArray) -> LastTokens:
        """Plan slices that reach the last known token of these rows of the table; their order may change."""
        self._contexts.update()
        attention = self._planner.plan(rows, rows[:0], rows[:0])
        if np.array_equal(attention.decode_rows, rows):
            return LastTokens(rows, token_rows, attention)
        place_of_row = dict(zip(rows.tolist(), token_rows.tolist(), strict=True))
        ordered = [place_of_row[row] for row in attention.decode_rows.tolist()]
        return LastTokens(attention.decode_rows, np.array(ordered, np.int64), attention)


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
    places: Tensor | None = None  # [tokens, 3] int64: of rotations, along each axis; None: `positions` are all of them
    pictures: PictureRows | None = None  # None: every token row has the input of its token
    states: StateRows | DeviceStateRows | None = None  # None: the model has none
    rings: RingRows | None = None  # None: layers with a window keep theirs in the blocks of tokens

    @property
    def rotated_at(self) -> Tensor:
        return self.positions if self.places is None else self.places
