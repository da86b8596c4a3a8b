"""What the layers of one forward pass share."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from alignedserve.runtime.attention.backend import StepAttention
from alignedserve.runtime.engine.forward.forward_batch import ForwardBatch, LastTokenRows
from alignedserve.runtime.engine.forward.hidden_pass import HiddenPass, Rotation
from alignedserve.runtime.engine.forward.state_storage import StateStorage
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.decoder.decoder_parts import TemperatureConfig
from kernels.adapters.device_lora import DeviceRows
from kernels.adapters.lora import AdapterRows, LayerAdapters
from kernels.addend_layout import LayerProduct
from kernels.linear import AdaptableProjection

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
        """Mark what the pass is about to write: states of a model that has some, and rings."""
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
        part, place = divmod(cache, self.storage.layout.num_layers)
        if not part:
            return place, self.batch.slots
        assert self.batch.rings is not None, "a layer behind those of a block"
        return place, self.batch.rings.slots[part - 1]

    def settle_rings(self, cache: int) -> None:
        """Let a layer that has read its keys and values leave them where later tokens find them."""
        part, place = divmod(cache, self.storage.layout.num_layers)
        if part and self.batch.rings is not None:
            self.batch.rings.settle(part - 1, place, self.storage)

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
        """Let all layers from here on, none of which has keys and values of its own, compute these rows alone.

        Return those of the stream hidden [tokens, ...].
        """
        rows = last.token_rows
        kept = {
            id(one): (one[0].index_select(0, rows), one[1].index_select(0, rows))
            for one in self.rotations
            if one is not None
        }
        self.rotations = [None if one is None else kept[id(one)] for one in self.rotations]
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
