"""The tensors of one forward pass, whichever sequences they came from, and its hidden caches.

What the layers of one forward pass share: its tensors, states in blocks, and heads of several sizes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.core.ids import BlockId
from alignedserve.runtime.attention.backend import AttentionPlanner, StepAttention
from alignedserve.runtime.attention.ring_tables import RingRows
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.state_headers import UNFINISHED, states_of, tokens_behind_states
from alignedserve.runtime.model.decoder.decoder_parts import TemperatureConfig
from alignedserve.runtime.model.decoder.model_config import ModelConfig, cache_source, cached_places
from alignedserve.runtime.model.decoder.state_config import HEADER_BYTES, StateConfig, layers_in_block, state_bytes
from alignedserve.runtime.model.weights.weight_loader import LayerWeights
from alignedserve.runtime.pictures import PictureRows
from kernels.addend_layout import LayerProduct
from kernels.linear import AdaptableProjection
from kernels.lora import AdapterRows, DeviceRows, LayerAdapters
from kernels.rotary import HeadNorms, HeadPlacement, rotate_
from kernels.states.state_rows import DeviceStateRows, StateRows

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
        self, rows: HiddenRows, storage: BlockStorage, place_heads: HeadPlacement, rotations: Sequence[Rotation | None]
    ) -> None:
        self._rows = rows
        self._storage = storage
        self._place_heads = place_heads
        self._rotations = rotations
        self._tile = _CPU_TILE_ROWS if rows.slots.device.type == "cpu" else _GPU_TILE_ROWS

    def recompute(self, inputs: Tensor, layer: int, weights: LayerWeights, *, is_norm_first: bool) -> None:
        """Write the new tokens' layer inputs, and recompute the keys and values of the tokens before. inputs [tokens,
        hidden_size]: of all tokens of the pass."""
        rows = self._rows
        cache = self._storage.input_slots(layer, inputs.shape[1])
        cache.index_copy_(0, rows.inputs, inputs[rows.first :])
        for first in range(0, len(rows.cached), self._tile):
            part = slice(first, first + self._tile)
            x = cache.index_select(0, rows.cached[part])
            fused = weights.qkv(weights.attention_norm(x) if is_norm_first else x)
            self._place_recomputed(fused, weights, _rows_of(self._rotations[layer], part), rows.slots[part])

    def place(self, fused: Tensor, layer: int, weights: LayerWeights, rotation: Rotation | None, slots: Tensor) -> None:
        """Rotate all tokens' queries and keys, and write keys and values to their slots. fused [tokens, query_width + 2
        * kv_width]; rotation: of all tokens; slots [tokens]."""
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
    """The slices of one step that reach their sequences' last known tokens, on the host. A chunk of a prompt asks for
    the logits of one token, or of none while more of the prompt follows. So on the last layer the other tokens have no
    queries, no attention and no feed-forward part: of twelve layers' products of a prompt that spares a sixteenth. Each
    remaining token attends like a decode: its keys and values are in its blocks."""

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


class StateStorage:
    """Views of a storage's states; the storage is the only owner."""

    def __init__(self, config: ModelConfig, storage: BlockStorage) -> None:
        assert config.state is not None, "a model without states"
        self.storage = storage
        self._num_tokens = tokens_behind_states(storage)
        self._parts: dict[int, Sequence[Tensor]] = {}
        self._columns: dict[int, int] = {}
        states, num_layers = states_of(storage), len(config.state_layers)
        if storage.layout.state_blocks:
            num_layers = layers_in_block(config.state, storage.layout.dtype, storage.layout.block_bytes)
        layer_bytes = state_bytes(config.state, storage.layout.dtype)
        for index, layer in enumerate(config.state_layers):
            self._columns[layer], place_in_block = divmod(index, num_layers)
            first = HEADER_BYTES + place_in_block * layer_bytes
            self._parts[layer] = _views(config.state, storage.layout.dtype, states[:, first : first + layer_bytes])

    def parts(self, layer: int) -> Sequence[Tensor]:
        return self._parts[layer]

    def column(self, layer: int) -> int:
        return self._columns[layer]

    def begin(self, rows: StateRows | DeviceStateRows) -> None:
        self._num_tokens.index_fill_(0, torch.as_tensor(rows.targets), UNFINISHED)

    def end(self, rows: StateRows | DeviceStateRows) -> None:
        self._num_tokens.index_copy_(0, torch.as_tensor(rows.targets), torch.as_tensor(rows.num_tokens))


def _views(config: StateConfig, cache_dtype: str, layer: Tensor) -> list[Tensor]:
    views, first = [], 0
    for part in config.parts:
        dtype, size = torch_dtype(part.dtype(cache_dtype)), part.num_bytes(cache_dtype)
        flat = layer[:, first : first + size].view(dtype)
        views.append(flat[:, : torch.Size(part.shape).numel()].view(-1, *part.shape))
        first += size
    return views


_NOTHING = torch.empty((0, 0))


class PassState:
    """The state that all layers of one forward pass share."""

    __slots__ = (
        *("attention", "attention_s", "batch", "chunk_attention_s", "gates", "hidden", "last", "layer_embeddings"),
        *("cache_of_layer", "kind_rows", "mixer_inputs", "rotations", "shared", "states", "storage", "temperatures"),
    )

    def __init__(
        self,
        batch: ForwardBatch,
        storage: BlockStorage,
        rotations: Sequence[Rotation | None],
        cache_of_layer: Mapping[int, int],
    ) -> None:
        self.batch = batch
        self.cache_of_layer = cache_of_layer  # the place in the whole cache of each layer's keys and values
        self.storage = storage
        self.rotations = rotations  # of each layer
        self.attention: StepAttention = batch.attention
        self.hidden: HiddenPass | None = None  # of sequences with a hidden cache
        self.temperatures: Tensor | None = None  # [tokens, 1]: factors of queries on layers without rotation
        self.states: StateStorage | None = None  # of a model that has some
        self.gates: Tensor | None = None  # of this layer's attention, where it has some [tokens, query_width]
        self.mixer_inputs = _NOTHING  # of this layer's mixer, where it attends as well [tokens, in_width]
        self.layer_embeddings: Tensor | None = None  # of a model that has some [tokens, layers, width]
        # Keys and values [tokens, width] that later layers read as well, by the layer of the cache.
        self.shared: dict[int, tuple[Tensor, Tensor]] = {}
        self.kind_rows: dict[int, Tensor] = {}  # see rows_of_kind
        self.last: LastTokenRows | None = None  # of this layer: it goes on with these rows alone
        self.attention_s = 0.0
        self.chunk_attention_s = 0.0

    def begin(self, states: StateStorage | None) -> None:
        self.states = states
        if states is not None and self.batch.states is not None:
            states.begin(self.batch.states)
        if self.batch.rings is not None:
            self.batch.rings.begin(self.storage)

    def end(self) -> None:
        if self.states is not None and self.batch.states is not None:
            self.states.end(self.batch.states)
        if self.batch.rings is not None:
            self.batch.rings.end(self.storage)

    def rows_of_kind(self, kind: int) -> Tensor:
        if not self.storage.layout.unlike:
            return self.batch.slots
        if kind not in self.kind_rows:
            self.kind_rows[kind] = self.storage.kinds[kind].rows(self.batch.slots)
        return self.kind_rows[kind]

    def cache_rows(self, cache: int) -> tuple[int, Tensor]:
        part, index = divmod(cache, self.storage.layout.num_layers)
        if not part:
            return index, self.batch.slots
        assert self.batch.rings is not None, "a layer behind those of a block"
        return index, self.batch.rings.slots[part - 1]

    def settle_rings(self, cache: int) -> None:
        """Let a layer that has read its keys and values leave them where later tokens find them."""
        part, index = divmod(cache, self.storage.layout.num_layers)
        if part and self.batch.rings is not None:
            self.batch.rings.settle(part - 1, index, self.storage)

    def kept(self, rows: Tensor) -> Tensor:
        """Return those of [tokens, ...] that the layer goes on with once the keys and values are written."""
        return rows if self.last is None else rows.index_select(0, self.last.token_rows)

    def kept_adapters(self) -> AdapterRows | DeviceRows | None:
        adapters = self.batch.adapters
        if adapters is None or self.last is None:
            return adapters
        assert isinstance(adapters, AdapterRows), "on a device no layer leaves rows out"
        return adapters.selected(self.last.token_rows.numpy())

    def embeddings_of(self, layer: int) -> Tensor | None:
        """Return a layer's own embeddings [rows, width] of the rows that it goes on with; None: there are none."""
        return None if self.layer_embeddings is None else self.kept(self.layer_embeddings[:, layer])

    def cut(self, hidden: Tensor, last: LastTokenRows) -> Tensor:
        """Let all layers from here on, none of which has keys and values of its own, compute these rows alone. Return
        those of the stream hidden [tokens, ...]."""
        rows = last.token_rows
        cut_rotations = {
            id(rotation): (rotation[0].index_select(0, rows), rotation[1].index_select(0, rows))
            for rotation in self.rotations
            if rotation is not None
        }
        self.rotations = [None if rotation is None else cut_rotations[id(rotation)] for rotation in self.rotations]
        if self.layer_embeddings is not None:
            self.layer_embeddings = self.layer_embeddings.index_select(0, rows)
        self.attention, self.last = last.attention, None
        return hidden.index_select(0, rows)


def temperatures(positions: Tensor, config: TemperatureConfig) -> Tensor:
    steps = ((positions.float() + 1.0) / config.step).floor_()
    return steps.log1p_().mul_(config.scale).add_(1.0)[:, None]


def adapted_product(
    product: LayerProduct,
    layer: int,
    multiply: AdaptableProjection,
    x: Tensor,
    adapters: AdapterRows | DeviceRows | None,
) -> Tensor:
    return multiply(x) if adapters is None else LayerAdapters(adapters, layer).product(product, multiply, x)


class ExtraHeads:
    """Normalises, rotates and writes the heads of each layer in their own sizes."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._num_heads = config.num_heads
        self._of_layer = [config.heads_of(layer) for layer in range(config.num_layers)]
        self._places = {sizes: HeadPlacement(config.num_heads, *sizes, dtype, device) for sizes in set(self._of_layer)}
        sources = [cache_source(config, layer) for layer in range(config.num_layers)]
        self._source_of, self._cached = sources, cached_places(config)
        self._shared = frozenset(source for layer, source in enumerate(sources) if source != layer)

    def placed(
        self, fused: Tensor, norms: HeadNorms | None, layer: int, run: PassState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's queries, and the keys and values that it reads [tokens, width]; write those if they are its
        own.

        fused    [tokens, width]"""
        sizes, rotation, source = self._of_layer[layer], run.rotations[layer], self._source_of[layer]
        assert norms is not None, "heads without norms"
        heads = fused.view(len(fused), -1, sizes.head_dim)
        counts = [self._num_heads] + ([sizes.num_kv_heads] * 2 if source == layer else [])
        norms.normalise_(*torch.split(heads, counts, dim=1))
        query_width = self._num_heads * sizes.head_dim
        if source == layer:
            kind, index = self._cached[layer]
            write = partial(self._places[sizes], fused, None, rotation)
            run.storage.kinds[kind].write(index, run.rows_of_kind(kind), write)
            keys, values = torch.split(fused[:, query_width:], sizes.num_kv_heads * sizes.head_dim, dim=1)
            if layer in self._shared:
                run.shared[layer] = keys, values
        elif rotation is not None:
            rotate_(heads, *rotation)
        queries = fused[:, :query_width].mul_(math.sqrt(sizes.head_dim))
        return queries, *((keys, values) if source == layer else run.shared[source])
