"""The tensors of one forward pass, whichever sequences they came from, and its hidden caches."""

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
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.weights.decoder_weights import LayerWeights
from alignedserve.runtime.pictures import PictureRows
from kernels.device_lora import DeviceRows
from kernels.lora import AdapterRows
from kernels.rotary import HeadPlacement
from kernels.states.device_rows import DeviceStateRows
from kernels.states.state_rows import StateRows

Rotation = tuple[Tensor, Tensor]

# Tokens whose keys and values are recomputed at a time. On a CPU intermediate results then stay in the cache; on a GPU
# it is enough for a product's full speed.
_CPU_TILE_ROWS = 512
_GPU_TILE_ROWS = 16384


class HiddenRows(NamedTuple):
    """The sequences with a hidden cache of one forward pass, whose token rows come last."""

    first: int  # their first token row
    recomputed: BlockStorage  # of one layer; their new tokens' slots are of this storage
    inputs: Tensor  # [new tokens] int64: rows of BlockStorage.input_slots that take the layer inputs
    cached: Tensor  # [tokens before] int64: rows of the same that hold the earlier ones
    positions: Tensor  # [tokens before] int64
    slots: Tensor  # [tokens before] int64: rows of the recomputed keys' slots


class HiddenPass:
    """Writes layer inputs, and recomputes earlier keys and values: on every layer `recompute`, then `place`."""

    def __init__(
        self,
        rows: HiddenRows,
        storage: BlockStorage,
        place_heads: HeadPlacement,
        rotations: Sequence[Rotation | None],
    ) -> None:
        self._rows = rows
        self._storage = storage
        self._place_heads = place_heads
        self._rotations = rotations
        self._tile = _CPU_TILE_ROWS if rows.slots.device.type == "cpu" else _GPU_TILE_ROWS

    def recompute(self, inputs: Tensor, layer: int, weights: LayerWeights, *, is_norm_first: bool) -> None:
        """Write the new tokens' layer inputs, and recompute the keys and values of the tokens before.

        inputs [tokens, hidden_size]: of all tokens of the pass.
        """
        rows = self._rows
        cache = self._storage.input_slots(layer, inputs.shape[1])
        cache.index_copy_(0, rows.inputs, inputs[rows.first :])
        for first in range(0, len(rows.cached), self._tile):
            part = slice(first, first + self._tile)
            x = cache.index_select(0, rows.cached[part])
            fused = weights.qkv(weights.attention_norm(x) if is_norm_first else x)
            self._place_recomputed(fused, weights, _rows_of(self._rotations[layer], part), rows.slots[part])

    def place(self, fused: Tensor, layer: int, weights: LayerWeights, rotation: Rotation | None, slots: Tensor) -> None:
        """Rotate all tokens' queries and keys, and write keys and values to their slots.

        fused [tokens, query_width + 2 * kv_width]; rotation: of all tokens; slots [tokens].
        """
        plain, hidden = slice(None, self._rows.first), slice(self._rows.first, None)
        if self._rows.first:
            cached = (self._storage.key_slots(layer), self._storage.value_slots(layer))
            self._place_heads(fused[plain], weights.head_norms, _rows_of(rotation, plain), slots[plain], *cached)
        if len(fused[hidden]):
            self._place_recomputed(fused[hidden], weights, _rows_of(rotation, hidden), slots[hidden])

    def _place_recomputed(self, fused: Tensor, weights: LayerWeights, rotation: Rotation | None, slots: Tensor) -> None:
        recomputed = self._rows.recomputed
        self._place_heads(
            fused, weights.head_norms, rotation, slots, recomputed.key_slots(0), recomputed.value_slots(0)
        )


def _rows_of(rotation: Rotation | None, rows: slice) -> Rotation | None:
    return None if rotation is None else (rotation[0][rows], rotation[1][rows])


class LastTokenRows(NamedTuple):
    """The token rows of a forward pass that its last layer computes to the end."""

    token_rows: Tensor  # [rows] int64
    attention: StepAttention  # their own on the last layer: each decodes, in this order


class LastTokens(NamedTuple):
    """The slices of one step that reach their sequences' last known tokens, on the host.

    A chunk of a prompt asks for the logits of one token, or of none while more of the prompt follows. So on the last
    layer the other tokens have no queries, no attention and no feed-forward part: of twelve layers' products of a
    prompt that spares a sixteenth. Each remaining token attends like a decode: its keys and values are in its blocks.
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
