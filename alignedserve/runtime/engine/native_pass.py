"""Steps of decodes through all layers by one call of the native kernels, for models and steps that they cover."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.runtime.attention.native_backend import PagedStep
from alignedserve.runtime.engine.forward_batch import ForwardBatch
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.model_config import ModelConfig
from alignedserve.runtime.model.weight_loader import DecoderWeights, LayerWeights
from kernels.cpu.decode_pass import (
    CacheSlots,
    DecodePass,
    LayerParts,
    NativeParts,
    NativeProduct,
    PassTimes,
    decode_pass_available,
)
from kernels.cpu.rows import NormRows
from kernels.feed_forward import FeedForwardPart
from kernels.linear import Projection
from kernels.norm import LayerNorm, Norm, RmsNorm
from kernels.rotary import HeadPlacement


class PassResult(NamedTuple):
    """A step's last addition to the residual stream [tokens, hidden_size], and its times."""

    pending: Tensor
    times: PassTimes


class NativePass:
    """All layers of a model whose every part has a native kernel; only for steps without chunks and hidden caches."""

    def __init__(
        self, layers: Sequence[LayerParts], place: HeadPlacement, hidden_size: int, dtype: torch.dtype
    ) -> None:
        assert place.native_rows is not None, "see native_pass"
        self._pass = DecodePass(layers, place.native_rows, hidden_size, dtype)
        self._num_layers = len(layers)
        self._storage: BlockStorage | None = None
        self._slots = CacheSlots(0, 0, 0, 0, False)

    def run(
        self, hidden: Tensor, batch: ForwardBatch, storage: BlockStorage, rotations: Sequence[tuple[Tensor, Tensor]]
    ) -> PassResult | None:
        """Run the residual stream [tokens, hidden_size], updated in place. `rotations` of every rope. None: this step
        is not for it, and nothing has changed."""
        step = batch.attention
        plan = step.decode_plan if isinstance(step, PagedStep) and batch.hidden is None else None
        if plan is None:
            return None
        return PassResult(*self._pass.run(hidden, plan, rotations, batch.slots, self._slots_of(storage)))

    def _slots_of(self, storage: BlockStorage) -> CacheSlots:
        """Return where the storage's slots lie; an engine has one storage, so the latest is kept."""
        if self._storage is not storage:
            layers = range(self._num_layers)
            keys, values = [storage.key_slots(layer) for layer in layers], map(storage.value_slots, layers)
            self._storage, self._slots = storage, self._pass.slots_of(keys, list(values))
        return self._slots


def native_pass(
    config: ModelConfig, weights: DecoderWeights, place: HeadPlacement, rope_of_layer: Sequence[int]
) -> NativePass | None:
    """Make the pass; None: the kernels are not built, or a part of this model has none. `rope_of_layer`: the index of
    each layer's rotation; empty: nothing is rotated."""
    has_extras = config.query_multiplier != 1.0 or config.residual_multiplier != 1.0
    is_plain = config.is_norm_first and not config.has_parallel_residual and not has_extras
    if not decode_pass_available() or not is_plain or place.native_rows is None:
        return None
    layers = []
    for layer, own in enumerate(weights.layers):
        rope = rope_of_layer[layer] if rope_of_layer else None
        parts = _layer_parts(own, rope, layer in config.windowed_layers)
        if parts is None:
            return None
        layers.append(parts)
    return NativePass(layers, place, config.hidden_size, weights.embedding.dtype)


def _layer_parts(layer: LayerWeights, rope: int | None, is_windowed: bool) -> LayerParts | None:
    has_post_norms = layer.attention_post_norm is not None or layer.mlp_post_norm is not None
    if has_post_norms or not isinstance(layer.mlp, FeedForwardPart):
        return None
    head_norms = None if layer.head_norms is None else layer.head_norms.native_rows
    if layer.head_norms is not None and head_norms is None:
        return None
    attention_norm, mlp_norm = _native_norm(layer.attention_norm), _native_norm(layer.mlp_norm)
    products = [_native_parts(product) for product in (layer.qkv, layer.output, *layer.mlp.products)]
    if attention_norm is None or mlp_norm is None or not all(products):
        return None
    qkv, output, gate_up, down = products
    return LayerParts(attention_norm, qkv, output, mlp_norm, gate_up, down, rope, is_windowed, head_norms)


def _native_norm(norm: Norm) -> NormRows | None:
    return norm.native_rows if isinstance(norm, LayerNorm | RmsNorm) else None


def _native_parts(product: Projection) -> NativeParts:
    return product.native_parts if isinstance(product, NativeProduct) else ()
