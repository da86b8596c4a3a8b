"""The weights of a decoder, ready to run."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.weights.weight_source import RowLookup
from kernels.activation import Norm
from kernels.feed_forward import ExpertsBeside, FeedForwardPart
from kernels.float8_linear import Float8Linear
from kernels.layer_embeddings import LayerEmbeddings, LayerEnd
from kernels.linear import AdaptableProjection, Projection
from kernels.rotary import HeadNorms
from kernels.states.state_rows import StateMixer
from kernels.streams import StreamEnds, StreamMix


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, with the products of the same input fused."""

    attention_norm: Norm
    qkv: AdaptableProjection  # [query_width + 2 * kv_width, hidden_size]
    head_norms: HeadNorms | None
    output: AdaptableProjection
    mlp_norm: Norm
    mlp: FeedForwardPart | Projection | None  # a mixture of experts is one product from outside; None: there is none
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    sinks: Tensor | None = None  # [num_heads] scores, see ModelConfig.has_sinks
    # Of a layer with a state: qkv and output are the products around it; or, if it attends as well, qkv makes the
    # inputs of both, and this one has an output of its own.
    mixer: StateMixer | None = None
    mixer_output: AdaptableProjection | None = None
    # Of models with LayerExtras:
    beside: ExpertsBeside | None = None  # experts beside the feed-forward part
    end: LayerEnd | None = None
    streams: StreamMix | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model, on one device and in one dtype."""

    embedding: RowLookup  # [vocab_size, embedding_size]
    positions: Tensor | None  # [position_offset + max_position_embeddings, hidden_size]
    project_in: Projection | None
    layers: tuple[LayerWeights, ...]
    final_norm: Norm | None
    project_out: Projection | None
    lm_head: Projection
    layer_embeddings: LayerEmbeddings | None = None
    stream_ends: StreamEnds | None = None

    @property
    def layer_projections(self) -> tuple[Projection, ...]:
        return tuple(product for layer in self.layers for product in _layer_products(layer))


def _layer_products(layer: LayerWeights) -> tuple[Projection, ...]:
    beside = () if layer.mixer_output is None else (layer.mixer_output,)
    return (layer.qkv, layer.output, *beside, *_products(layer.mlp))


def _products(mlp: FeedForwardPart | Projection | None) -> tuple[Projection, ...]:
    if mlp is None:
        return ()
    return mlp.products if isinstance(mlp, FeedForwardPart) else (mlp,)


def leave_rounded_rows_unwritten(weights: DecoderWeights, config: ModelConfig) -> None:
    """Let norms and gates write only what FP8 products read: no request has adapters, which read the rows
    themselves."""
    embedding = weights.embedding
    unread = torch.full((1, 1), math.nan, dtype=embedding.dtype, device=embedding.device)
    for layer in weights.layers if config.is_norm_first else ():
        round_on_the_way(layer, unread)


def round_on_the_way(weights: LayerWeights, unread: Tensor | None = None) -> None:
    """Let norms and gates round what products in FP8 read as they compute it, which a GPU then reads once less."""
    if isinstance(weights.qkv, Float8Linear):
        weights.attention_norm.round_results(unread)
    if isinstance(weights.mlp, FeedForwardPart) and isinstance(weights.mlp.gate_up, Float8Linear):
        weights.mlp_norm.round_results(unread)
        if isinstance(weights.mlp.down, Float8Linear):
            weights.mlp.gate_up.round_results(unread)
