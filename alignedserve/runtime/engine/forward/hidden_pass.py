"""The hidden caches of one forward pass: writes layer inputs, and recomputes keys and values from earlier ones."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.weights.decoder_weights import LayerWeights
from kernels.rotary import HeadPlacement

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
    """Hidden caches of one pass. On every layer `recompute` comes first, then `place`."""

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
