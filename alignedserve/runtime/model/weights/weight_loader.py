"""Assembles the weights of a model out of the tensors of a source.

Reads what layers of Gemma 3n and 4 have beyond others (LayerExtras).

The weights of a decoder, ready to run.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.runtime.model.decoder.decoder_parts import HeadNormKind, LatentConfig, LayerExtras, NormKind
from alignedserve.runtime.model.decoder.model_config import ModelConfig, inner_size
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.sharding.layer_stages import LayerStage
from alignedserve.runtime.model.weight_names import (
    ParameterNames,
    find_head,
    find_prefix,
    layer_prefixes,
    own_products,
    query_modules,
)
from alignedserve.runtime.model.weights.feed_forward_weights import ExpertReading, FeedForwardReader, LayerExperts
from alignedserve.runtime.model.weights.packed_products import Rows
from alignedserve.runtime.model.weights.product_reader import (
    NONE,
    LoadingObserver,
    ProductReader,
    StateReader,
    halves_of_heads,
    heads_to_qkv,
    pairs_apart,
    rotated_first,
)
from alignedserve.runtime.model.weights.weight_source import RowLookup, WeightSource
from kernels.activation import Gated, LayerNorm, NoNorm, Norm, RmsNorm
from kernels.feed_forward import (
    EmbeddingGate,
    Experts,
    ExpertsBeside,
    FeedForwardPart,
    LayerEmbeddings,
    LayerEnd,
    SparseFeedForward,
)
from kernels.float8_linear import Float8Linear
from kernels.grouped_linear import SortedExperts
from kernels.linear import AdaptableProjection, HeadProducts, LatentOutput, LatentQueries, Projection
from kernels.rotary import HeadNorms
from kernels.states.state_rows import StateMixer
from kernels.streams import Laurel, StreamEnds, StreamMix


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


_EPS = 1e-6  # of the norms of short rows, whatever config.json has for the others


def latent_queries(
    read: ProductReader, config: ModelConfig, latent: LatentConfig, names: ParameterNames, prefix: str
) -> LatentQueries:
    def turned(rows: Rows, num_heads: int) -> Rows:
        return rows.changed(
            lambda part: rotated_first(part, latent.rope_dim, num_heads, is_paired=names.interleaves_pairs)
        )

    *first, last = [prefix + name for name in query_modules(names, latent)]
    queries: list[Projection | Norm] = []
    in_width = config.hidden_size
    if latent.query_rank is not None:
        queries.append(read.linear(first, [latent.query_rank], in_width, has_bias=False))
        queries.append(_norm(read, prefix + names.query_row_norm, latent.query_rank))
        in_width = latent.query_rank
    heads = read.rows(last, config.num_heads * latent.query_dim, in_width)
    queries.append(read.product([last], [turned(heads, config.num_heads)], None))
    row = read.rows(prefix + names.latent, latent.row_width, config.hidden_size)
    keys, _ = _heads_of_latent(read, config, latent, prefix + names.heads_of_latent)
    return LatentQueries(
        queries,
        read.product([prefix + names.latent], [turned(row, 1)], None),
        _norm(read, prefix + names.latent_norm, latent.rank),
        HeadProducts(keys.mT),
    )


def _heads_of_latent(
    read: ProductReader, config: ModelConfig, latent: LatentConfig, module: str
) -> tuple[Tensor, Tensor]:
    width = latent.nope_dim + latent.value_dim
    weight = read.tensor(f"{module}.weight", config.num_heads * width, latent.rank)
    heads = weight.view(config.num_heads, width, latent.rank)
    return heads[:, : latent.nope_dim], heads[:, latent.nope_dim :]


def _norm(read: ProductReader, module: str, width: int) -> RmsNorm:
    return RmsNorm(read.tensor(f"{module}.weight", width), _EPS, read.dtype)


class StageReading(NamedTuple):
    """What one stage of a worker reads."""

    stage: LayerStage
    reads_all: bool = False  # and drops other layers: a random source draws in order


def assemble_weights(
    config: ModelConfig,
    source: WeightSource,
    quantization: str | None = None,
    *,
    observer: LoadingObserver | None = None,
    stage: StageReading | None = None,
    sharing: ExpertReading | None = None,
) -> DecoderWeights:
    """Assemble all weights, or a stage's, or with one process's experts by `sharing`; at most one layer is held
    twice. `quantization`: None, or "int8" for linear layers. Raises ModelError naming a layer that cannot be
    quantized."""
    assembler = _WeightAssembler(config, source, quantization, observer, sharing)
    return assembler.weights() if stage is None else assembler.weights_of(stage)


def assemble_experts(
    config: ModelConfig, source: WeightSource, quantization: str | None, sharing: ExpertReading
) -> LayerExperts:
    """Assemble the experts alone that one process has, by layer."""
    return _WeightAssembler(config, source, quantization, None, sharing).experts(reads_all=sharing.reads_all)


class _WeightAssembler:
    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        quantization: str | None,
        observer: LoadingObserver | None,
        sharing: ExpertReading | None,
    ) -> None:
        names = source.names or FAMILIES[config.family].names
        read = ProductReader(source, observer, is_int8=quantization == "int8")
        self._config, self._names, self._read, self._observer = config, names, read, observer
        self._feed_forward = FeedForwardReader(config, names, read, sharing)
        self._states = StateReader(config, names, read)
        self._extras = None if config.extras is None else ExtraReader(config, config.extras, names, read)
        self._prefix = find_prefix(names, read.source.has)
        self._embedding = self._prefix + names.embedding
        if config.ties_embeddings and not read.source.has(f"{self._embedding}.weight"):
            self._embedding = find_head(names, read.source.has)  # the name by which some savers keep what is tied

    def weights_of(self, reading: StageReading) -> DecoderWeights:
        stage = reading.stage
        layers = range(stage.first, stage.end)
        if stage.is_first or reading.reads_all:
            read = self._weights(range(self._config.num_layers) if reading.reads_all else layers, layers)
            if stage.is_first:
                return read
            return _inner(read.layers, self._config, self._read)
        self._read.dtype, self._read.device = self._read.source.dtype, self._read.source.device
        return _inner(tuple(map(self._packed_layer, layers)), self._config, self._read)

    def experts(self, *, reads_all: bool) -> LayerExperts:
        if reads_all:
            self._weights(range(self._config.num_layers), range(0))
            return self._feed_forward.own
        self._read.dtype, self._read.device = self._read.source.dtype, torch.device("cpu")
        for layer in range(self._config.num_layers):
            experts = self._config.experts_of(layer)
            if experts is not None and layer not in self._config.bare_layers:
                _, second = layer_prefixes(self._config, self._names, layer)
                self._feed_forward.read_own(self._prefix + second, experts, layer)
        return self._feed_forward.own

    def weights(self) -> DecoderWeights:
        layers = range(self._config.num_layers)
        return self._weights(layers, layers)

    def _weights(self, read: Iterable[int], layers: range) -> DecoderWeights:
        config, names = self._config, self._names
        embedding = self._read.lookup(f"{self._embedding}.weight", config.vocab_size, config.embedding_size)
        self._read.dtype, self._read.device = embedding.dtype, embedding.device
        positions = None
        if config.rope is None:
            num_positions = config.position_offset + config.max_position_embeddings
            positions = self._read.tensor(f"{self._prefix}{names.positions}.weight", num_positions, config.hidden_size)
        is_projected = config.embedding_size != config.hidden_size
        return DecoderWeights(
            embedding=embedding,
            positions=positions,
            project_in=self._projection(names.project_in, config.hidden_size) if is_projected else None,
            layers=tuple(
                weights for layer, weights in ((layer, self._packed_layer(layer)) for layer in read) if layer in layers
            ),
            final_norm=self._norm(f"{self._prefix}{names.final_norm}") if config.has_final_norm else None,
            project_out=self._projection(names.project_out, config.embedding_size) if is_projected else None,
            lm_head=self._head(embedding),
            layer_embeddings=None if self._extras is None else self._extras.layer_embeddings(self._prefix),
            stream_ends=None if self._extras is None else self._extras.stream_ends(self._prefix),
        )

    def _packed_layer(self, layer: int) -> LayerWeights:
        weights = self._layer(layer)
        if self._config.is_norm_first:
            round_on_the_way(weights)
        if self._observer is not None:
            self._observer.layer_packed()
        return weights

    def _layer(self, layer: int) -> LayerWeights:
        config, names = self._config, self._names
        prefix, second = (self._prefix + part for part in layer_prefixes(config, names, layer))
        has_state = layer in config.state_layers
        qkv, output = (self._states.inputs, self._states.output) if has_state else (self._qkv, self._output)
        mixer_output = None
        if self._extras is not None:
            qkv, output = partial(self._extras.queries, layer=layer), partial(self._extras.output, layer=layer)
        if config.mixes_beside:
            qkv, output, mixer_output = self._states.beside_attention, self._states.attended, self._states.mixed
        parts = None if self._extras is None else self._extras.parts(prefix)
        return LayerWeights(
            attention_norm=self._input_norm(prefix + names.attention_norm),
            qkv=qkv(prefix),
            head_norms=None if has_state and not config.mixes_beside else self._head_norms(prefix, layer),
            output=output(prefix),
            mixer=self._states.mixer(prefix) if has_state else None,
            mixer_output=None if mixer_output is None else mixer_output(prefix),
            mlp_norm=NoNorm() if layer in config.bare_layers else self._input_norm(second + names.mlp_norm),
            mlp=self._mlp(second, layer),
            attention_post_norm=self._norm(prefix + names.attention_post_norm) if config.has_post_norms else None,
            mlp_post_norm=self._norm(second + names.mlp_post_norm) if config.has_post_norms else None,
            sinks=self._read.tensor(prefix + names.sinks, config.num_heads) if config.has_sinks else None,
            beside=self._beside(second, layer),
            end=None if parts is None else parts.end,
            streams=None if parts is None else parts.streams,
        )

    def _mlp(self, prefix: str, layer: int) -> FeedForwardPart | Projection | None:
        if layer in self._config.bare_layers:
            return None
        experts = self._config.experts_of(layer)
        if experts is not None and not experts.is_beside:
            return self._feed_forward.mixed(prefix, experts, layer)
        projection = None if self._extras is None else self._extras.feed_forward(prefix, layer)
        return self._feed_forward.dense(prefix, layer) if projection is None else projection

    def _beside(self, prefix: str, layer: int) -> ExpertsBeside | None:
        experts = self._config.experts_of(layer)
        if self._extras is None or experts is None:
            return None
        return self._extras.beside(prefix, self._feed_forward.mixed(prefix, experts, layer))

    def _qkv(self, prefix: str) -> AdaptableProjection:
        config = self._config
        if config.latent is not None:
            return latent_queries(self._read, config, config.latent, self._names, prefix)
        modules = [prefix + name for name in self._names.qkv]
        rows = [config.query_width, config.kv_width, config.kv_width]
        if self._names.interleaves_pairs:
            return self._paired_qkv(modules, rows)
        if config.has_attention_gate:
            return self._gated_qkv(modules, rows)
        if not self._names.interleaves_heads:
            rows = rows if len(modules) == 3 else [sum(rows)]
            return self._read.linear(modules, rows, config.hidden_size, config.has_qkv_bias)
        rows_in_all = 3 * config.query_width
        bias = self._read.tensor(f"{modules[0]}.bias", rows_in_all) if config.has_qkv_bias else None
        bias = None if bias is None else heads_to_qkv(bias, config)
        weight = self._read.rows(modules[0], rows_in_all, config.hidden_size).changed(lambda x: heads_to_qkv(x, config))
        return self._read.product(modules, [weight], bias)

    def _paired_qkv(self, modules: Sequence[str], rows: Sequence[int]) -> AdaptableProjection:
        config = self._config
        weights = [self._read.rows(name, count, config.hidden_size) for name, count in zip(modules, rows, strict=True)]
        weights[:2] = [weight.changed(lambda part: pairs_apart(part, config)) for weight in weights[:2]]
        bias = None
        if config.has_qkv_bias:
            parts = [self._read.tensor(f"{name}.bias", count) for name, count in zip(modules, rows, strict=True)]
            bias = torch.cat([*(pairs_apart(part, config) for part in parts[:2]), *parts[2:]])
        return self._read.product(modules, weights, bias)

    def _gated_qkv(self, modules: Sequence[str], rows: Sequence[int]) -> AdaptableProjection:
        config, read, (num_queries, num_keys, _) = self._config, self._read, rows
        both = read.rows(modules[0], 2 * num_queries, config.hidden_size)
        queries = both.changed(lambda part: halves_of_heads(part, config.head_dim)[0])
        gates = both.changed(lambda part: halves_of_heads(part, config.head_dim)[1])
        others = [read.rows(name, num_keys, config.hidden_size) for name in modules[1:]]
        bias = None
        if config.has_qkv_bias:
            query_bias, gate_bias = halves_of_heads(read.tensor(f"{modules[0]}.bias", 2 * num_queries), config.head_dim)
            bias = torch.cat([query_bias, *(read.tensor(f"{name}.bias", num_keys) for name in modules[1:]), gate_bias])
        return read.product(modules, [queries, *others, gates], bias)

    def _output(self, prefix: str) -> AdaptableProjection:
        config, module = self._config, prefix + self._names.output
        if config.latent is not None:
            latent = config.latent
            _, values = _heads_of_latent(self._read, config, latent, prefix + self._names.heads_of_latent)
            width = config.num_heads * latent.value_dim
            output = self._read.linear([prefix + self._names.output], [config.hidden_size], width, has_bias=False)
            return LatentOutput(HeadProducts(values), output, latent.row_width)
        return self._read.linear([module], [config.hidden_size], config.query_width, config.has_output_bias)

    def _projection(self, name: str, rows: int) -> Projection:
        columns = self._config.embedding_size + self._config.hidden_size - rows
        return self._read.linear([self._prefix + name], [rows], columns, has_bias=False)

    def _head(self, embedding: RowLookup) -> Projection:
        config = self._config
        head = find_head(self._names, self._read.source.has)
        stored = self._embedding if config.ties_embeddings else head
        packed = self._read.packed_rows(f"{stored}.weight", config.vocab_size, config.embedding_size)
        if packed is not None:
            return self._read.product([stored], [packed], None, has_few_rows=True)
        if config.ties_embeddings:
            assert isinstance(embedding, Tensor), "rows that are packed for looking them up alone"
            return self._read.projected("lm_head", embedding)
        from_files = self._read.file_product([head], [config.vocab_size], config.embedding_size, None, NONE)
        if from_files is not None:
            return from_files
        weight = self._read.tensor(f"{head}.weight", config.vocab_size, config.embedding_size)
        return self._read.projected("lm_head", weight)

    def _head_norms(self, prefix: str, layer: int) -> HeadNorms | None:
        config, names, kind = self._config, self._names, self._config.head_norm
        if self._extras is not None:
            return self._extras.head_norms(prefix, layer)
        if kind is HeadNormKind.NONE:
            return None
        if kind is HeadNormKind.UNSCALED:
            ones = torch.ones(config.head_dim, dtype=self._read.dtype, device=self._read.device)
            if config.rope_of(layer) is None:
                return None
            return HeadNorms(ones, ones, config.norm_eps, self._read.dtype, is_after_rotation=True)
        is_whole = kind is HeadNormKind.WHOLE
        widths = (config.query_width, config.kv_width) if is_whole else (config.head_dim, config.head_dim)
        queries, keys = (
            self._norm_weight(prefix + module, width)
            for module, width in zip((names.query_norm, names.key_norm), widths, strict=True)
        )
        is_after = kind is HeadNormKind.ROTATED_HEADS
        dtype = self._read.dtype
        return HeadNorms(queries, keys, config.norm_eps, dtype, is_whole=is_whole, is_after_rotation=is_after)

    def _input_norm(self, module: str) -> Norm:
        return self._norm(module) if self._config.has_input_norms else NoNorm()

    def _norm(self, module: str) -> Norm:
        width = self._config.hidden_size
        weight = self._norm_weight(module, width)
        if self._config.norm in (NormKind.RMS, NormKind.RMS_PLUS_ONE):
            return RmsNorm(weight, self._config.norm_eps, self._read.dtype)
        has_bias = self._config.norm is not NormKind.UNSHIFTED_LAYER
        bias = self._read.tensor(f"{module}.bias", width) if has_bias else None
        return LayerNorm(weight, bias, self._config.norm_eps)

    def _norm_weight(self, module: str, width: int) -> Tensor:
        weight = self._read.tensor(f"{module}.weight", width)
        if self._config.norm is NormKind.LAYER_PLUS_ONE:
            return weight + 1.0
        # Near 1, a bfloat16 keeps 8 bits of the small number that is added.
        return weight.float() + 1.0 if self._config.norm is NormKind.RMS_PLUS_ONE else weight


def _inner(layers: tuple[LayerWeights, ...], config: ModelConfig, read: ProductReader) -> DecoderWeights:
    nothing = torch.empty((1, config.embedding_size), dtype=read.dtype, device=read.device)
    return DecoderWeights(
        embedding=nothing,
        positions=None,
        project_in=None,
        layers=layers,
        final_norm=None,
        project_out=None,
        lm_head=_NoHead(),
    )


class _NoHead:
    in_width = out_width = 0

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("the first stage has the head")
