"""Reads what layers of Gemma 3n and 4 have beyond others (LayerExtras)."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.runtime.model.decoder.decoder_parts import LayerExtras
from alignedserve.runtime.model.decoder.model_config import ModelConfig, inner_size
from alignedserve.runtime.model.weight_names import ParameterNames, own_products
from alignedserve.runtime.model.weights.product_reader import ProductReader
from kernels.activation import Gated
from kernels.feed_forward import Experts, ExpertsBeside
from kernels.layer_embeddings import EmbeddingGate, LayerEmbeddings, LayerEnd
from kernels.linear import AdaptableProjection, Projection
from kernels.norm import RmsNorm
from kernels.rotary import HeadNorms
from kernels.sorted_experts import SortedExperts
from kernels.sparse_gates import SparseFeedForward
from kernels.streams import Laurel, StreamEnds, StreamMix


class ExtraParts(NamedTuple):
    """What a layer has beyond attention and feed-forward part."""

    end: LayerEnd
    streams: StreamMix | None


class ExtraReader:
    """Reads them of one model, which has such parts."""

    def __init__(self, config: ModelConfig, extras: LayerExtras, names: ParameterNames, read: ProductReader) -> None:
        assert names.extras is not None, "a family without these names"
        self._config, self._extras, self._read = config, extras, read
        self._names, self._own = names, names.extras

    def queries(self, prefix: str, layer: int) -> AdaptableProjection:
        """Return the product of a layer's queries, and of its keys and values if it has any."""
        config, width = self._config, self._config.hidden_size
        kv_heads, head_dim = config.heads_of(layer)
        count = own_products(config, self._extras, layer)
        modules = [prefix + name for name in self._names.qkv[:count]]
        rows = [config.num_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim][:count]
        if count == 2:  # values are made of what makes keys
            modules, rows = [*modules, modules[1]], [*rows, rows[1]]
        return self._read.linear(modules, rows, width, has_bias=False)

    def output(self, prefix: str, layer: int) -> AdaptableProjection:
        _, head_dim = self._config.heads_of(layer)
        width = self._config.hidden_size
        return self._read.linear([prefix + self._names.output], [width], self._config.num_heads * head_dim, False)

    def head_norms(self, prefix: str, layer: int) -> HeadNorms:
        config, head_dim = self._config, self._config.heads_of(layer).head_dim
        ones = torch.ones(head_dim, dtype=self._read.dtype, device=self._read.device)
        queries = self._read.tensor(f"{prefix}{self._names.query_norm}.weight", head_dim)
        keys = ones
        if layer in config.cached_layers:
            keys = self._read.tensor(f"{prefix}{self._names.key_norm}.weight", head_dim)
        return HeadNorms(queries, keys, config.norm_eps, self._read.dtype, values=ones)

    def feed_forward(self, prefix: str, layer: int) -> Projection | None:
        """Return a layer's feed-forward part; None: it is as that of any other family."""
        sparsity = self._extras.sparsities[layer] if self._extras.sparsities else 0.0
        if not sparsity:
            return None
        inner, width = inner_size(self._config, layer), self._config.hidden_size
        modules = [prefix + name for name in self._names.gate_up]
        gate_up = self._read.linear(modules, [inner, inner], width, False)
        down = self._read.linear([prefix + self._names.down], [width], inner, False)
        return SparseFeedForward(gate_up, down, self._gated(), sparsity)

    def beside(self, prefix: str, experts: Projection) -> ExpertsBeside:
        assert isinstance(experts, Experts | SortedExperts), "experts that are not routed by their own router"
        before, behind = (self._norm(prefix + name) for name in self._own.expert_norms)
        return ExpertsBeside(self._norm(prefix + self._own.dense_norm), experts, (before, behind))

    def parts(self, prefix: str) -> ExtraParts:
        extras, names, width = self._extras, self._own, self._config.hidden_size
        gate = None
        if extras.embedding_width:
            gate = EmbeddingGate(
                self._read.linear([prefix + names.embedding_gate], [extras.embedding_width], width, False),
                self._read.linear([prefix + names.embedding_output], [width], extras.embedding_width, False),
                self._norm(prefix + names.embedding_output_norm),
                self._gated(),
            )
        scale = self._read.tensor(prefix + names.scale, 1) if extras.has_scales else None
        return ExtraParts(LayerEnd(gate, scale), self._streams(prefix) if extras.num_streams > 1 else None)

    def _streams(self, prefix: str) -> StreamMix:
        extras, names, width, count = self._extras, self._own, self._config.hidden_size, self._extras.num_streams
        left, right = names.laurel
        laurel = Laurel(
            self._read.linear([prefix + left], [extras.laurel_rank], width, False),
            self._read.linear([prefix + right], [width], extras.laurel_rank, False),
            self._norm(prefix + names.laurel_norm),
        )
        scale = self._read.tensor(prefix + names.corrected_scale, width)
        return StreamMix(
            (self._norm(prefix + names.stream_norm), self._weight(prefix + names.stream_router, count, width)),
            self._weight(prefix + names.predictions, count**2, count),
            self._weight(prefix + names.corrections, count, count),
            scale if extras.scales_corrected else None,
            laurel,
        )

    def layer_embeddings(self, prefix: str) -> LayerEmbeddings | None:
        extras, names, num_layers = self._extras, self._own, self._config.num_layers
        if not extras.embedding_width:
            return None
        width = num_layers * extras.embedding_width
        table = self._read.tensor(f"{prefix}{names.embedding_table}.weight", extras.embedding_vocab, width)
        product = self._read.linear([prefix + names.embedding_projection], [width], self._config.hidden_size, False)
        norm = self._norm(prefix + names.embedding_norm, extras.embedding_width)
        return LayerEmbeddings(
            partial(table.index_select, 0), product, norm, num_rows=extras.embedding_vocab, num_layers=num_layers
        )

    def stream_ends(self, prefix: str) -> StreamEnds | None:
        """Return what makes streams, and one of them again; None: there is one."""
        width, count = self._config.hidden_size, self._extras.num_streams - 1
        if not count:
            return None
        names = (self._own.widening, self._own.narrowing)
        widening, narrowing = (
            [self._read.linear([prefix + name.format(stream=stream)], [width], width, False) for stream in range(count)]
            for name in names
        )
        return StreamEnds(widening, narrowing)

    def _gated(self) -> Gated:
        return Gated(self._config.activation.value, self._read.dtype, self._read.device)

    def _weight(self, module: str, rows: int, columns: int) -> Tensor:
        return self._read.tensor(f"{module}.weight", rows, columns)

    def _norm(self, module: str, width: int | None = None) -> RmsNorm:
        weight = self._read.tensor(f"{module}.weight", width or self._config.hidden_size)
        return RmsNorm(weight, self._config.norm_eps, self._read.dtype)
