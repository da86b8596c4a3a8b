"""Assembles the weights of a model out of the tensors of a source."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.file_products import FileSource, NotFiniteError, file_parts, file_product, packs_files
from alignedserve.runtime.model.model_config import ExpertConfig, ModelConfig, NormKind
from alignedserve.runtime.model.packed_experts import grouped_experts
from alignedserve.runtime.model.packed_products import PlainRows, Rows, packed_product
from alignedserve.runtime.model.weight_names import PARAMETER_NAMES, ParameterNames, find_head, find_prefix
from kernels.cpu.int8_linear import Int8Linear, int8_obstacle
from kernels.feed_forward import ExpertRouter, Experts, FeedForwardPart
from kernels.linear import AdaptableProjection, Linear, Projection
from kernels.narrow.float8_linear import Float8Linear
from kernels.norm import LayerNorm, Norm, RmsNorm
from kernels.rotary import HeadNorms
from kernels.sorted_experts import SortedExperts, stacked_experts


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, with the products of the same input fused."""

    attention_norm: Norm
    qkv: AdaptableProjection  # [query_width + 2 * kv_width, hidden_size]
    head_norms: HeadNorms | None
    output: AdaptableProjection
    mlp_norm: Norm
    mlp: FeedForwardPart | Projection  # a mixture of experts is one product from outside
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole model, on one device and in one dtype."""

    embedding: Tensor  # [vocab_size, embedding_size]
    positions: Tensor | None  # [position_offset + max_position_embeddings, hidden_size]
    project_in: Projection | None
    layers: tuple[LayerWeights, ...]
    final_norm: Norm | None
    project_out: Projection | None
    lm_head: Projection

    @property
    def layer_projections(self) -> tuple[Projection, ...]:
        """Return the products that every token passes, in order."""
        return tuple(product for layer in self.layers for product in (layer.qkv, layer.output, *_products(layer.mlp)))


def _products(mlp: FeedForwardPart | Projection) -> tuple[Projection, ...]:
    return mlp.products if isinstance(mlp, FeedForwardPart) else (mlp,)


class TensorSource(Protocol):
    """A source of weights."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor in its final dtype and on its device. Raises ModelError naming it."""


class PackedSource(TensorSource, Protocol):
    """A source whose matrices may be packed, under names of its own."""

    names: ParameterNames
    dtype: torch.dtype

    def packed(self, name: str, shape: tuple[int, ...]) -> Rows | None:
        """Return the matrix as products are computed with it; None when it is to be unpacked. Raises ModelError
        naming it."""


class LoadingObserver(Protocol):
    """A receiver of how far the loading has come."""

    def tensor_read(self, num_bytes: int) -> None:
        """Count a tensor."""

    def layer_packed(self) -> None:
        """Count a layer."""


def assemble_weights(
    config: ModelConfig,
    source: TensorSource,
    quantization: str | None = None,
    *,
    packed: PackedSource | None = None,
    files: FileSource | None = None,
    observer: LoadingObserver | None = None,
) -> DecoderWeights:
    """Assemble all weights, reading one tensor at a time, so that at most one layer is held twice.

    `quantization`: None, or "int8" for the linear layers. `packed`: the source, if its matrices may be; `files`:
    if its matrices need not be read before they are packed, so that none is held twice. Raises ModelError naming a
    layer that cannot be quantized.
    """
    return _WeightAssembler(config, source, quantization, _Forms(packed, files), observer).weights()


class _Forms(NamedTuple):
    """The source again, as what else it is."""

    packed: PackedSource | None
    files: FileSource | None


class _Nonlinearity(NamedTuple):
    """The nonlinearity after a product."""

    activation: str | None = None
    is_gated: bool = False


_NONE = _Nonlinearity()


class _WeightAssembler:
    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        quantization: str | None,
        forms: _Forms,
        observer: LoadingObserver | None,
    ) -> None:
        self._observer = observer
        self._config = config
        self._source = source
        self._is_int8 = quantization == "int8"
        self._packed, self._files = None if self._is_int8 else forms.packed, forms.files
        self._names = forms.packed.names if forms.packed else PARAMETER_NAMES[config.family]
        self._prefix = find_prefix(self._names, source.has)
        self._dtype = torch.float32  # of the weights; known when the first is read

    def weights(self) -> DecoderWeights:
        config, names = self._config, self._names
        embedding = self._tensor(f"{self._prefix}{names.embedding}.weight", config.vocab_size, config.embedding_size)
        self._dtype = embedding.dtype
        positions = None
        if config.rope is None:
            num_positions = config.position_offset + config.max_position_embeddings
            positions = self._tensor(f"{self._prefix}{names.positions}.weight", num_positions, config.hidden_size)
        is_projected = config.embedding_size != config.hidden_size
        return DecoderWeights(
            embedding=embedding,
            positions=positions,
            project_in=self._projection(names.project_in, config.hidden_size) if is_projected else None,
            layers=tuple(self._packed_layer(layer) for layer in range(config.num_layers)),
            final_norm=self._norm(f"{self._prefix}{names.final_norm}") if config.has_final_norm else None,
            project_out=self._projection(names.project_out, config.embedding_size) if is_projected else None,
            lm_head=self._head(embedding),
        )

    def _packed_layer(self, layer: int) -> LayerWeights:
        weights = self._layer(layer)
        if self._config.is_norm_first:
            _round_on_the_way(weights)
        if self._observer is not None:
            self._observer.layer_packed()
        return weights

    def _layer(self, layer: int) -> LayerWeights:
        config, names = self._config, self._names
        prefix = self._prefix + names.layer.format(layer=layer)
        experts = config.experts_of(layer)
        return LayerWeights(
            attention_norm=self._norm(prefix + names.attention_norm),
            qkv=self._qkv(prefix),
            head_norms=self._head_norms(prefix) if config.has_qk_norm else None,
            output=self._linear(
                [prefix + names.output], [config.hidden_size], config.query_width, config.has_output_bias
            ),
            mlp_norm=self._norm(prefix + names.mlp_norm),
            mlp=self._mlp(prefix) if experts is None else self._experts(prefix, experts),
            attention_post_norm=self._norm(prefix + names.attention_post_norm) if config.has_post_norms else None,
            mlp_post_norm=self._norm(prefix + names.mlp_post_norm) if config.has_post_norms else None,
        )

    def _mlp(self, prefix: str) -> FeedForwardPart:
        names = self._names
        modules = [prefix + name for name in names.gate_up]
        return self._feed_forward(modules, prefix + names.down, self._config.intermediate_size)

    def _feed_forward(self, gate_up: Sequence[str], down: str, inner: int) -> FeedForwardPart:
        config = self._config
        then = _Nonlinearity(config.activation.value, config.is_gated)
        num_rows, has_bias = inner * (2 if config.is_gated else 1), config.has_mlp_bias
        rows = [num_rows // len(gate_up)] * len(gate_up)
        return FeedForwardPart(
            self._linear(gate_up, rows, config.hidden_size, has_bias, then),
            self._linear([down], [config.hidden_size], inner, has_bias),
        )

    def _experts(self, prefix: str, experts: ExpertConfig) -> Projection:
        config, names = self._config, self._names
        weight = self._tensor(f"{prefix}{names.router}.weight", experts.num_experts, config.hidden_size)
        router = ExpertRouter(weight, experts.num_chosen, normalises=experts.normalises)
        inner, modules = experts.intermediate_size, []
        for index in range(experts.num_experts):
            gate_up = [prefix + name.format(expert=index) for name in names.expert_gate_up]
            modules.append((gate_up, prefix + names.expert_down.format(expert=index)))
        if has_experts_apart(weight.device):
            return Experts(router, [self._feed_forward(gate_up, down, inner) for gate_up, down in modules])
        shapes = ((inner, config.hidden_size), (config.hidden_size, inner))
        packed = self._packed_experts(router, modules, shapes)
        if packed is not None:
            return packed
        gate_ups = [torch.cat([self._tensor(f"{name}.weight", *shapes[0]) for name in pair]) for pair, _ in modules]
        downs = [self._tensor(f"{down}.weight", *shapes[1]) for _, down in modules]
        return stacked_experts(router, torch.stack(gate_ups), torch.stack(downs), config.activation.value)

    def _packed_experts(
        self, router: ExpertRouter, modules: Sequence[tuple[list[str], str]], shapes: Sequence[tuple[int, int]]
    ) -> SortedExperts | None:
        """Return the experts with their weights as stored; None where these are plain, or differ in form."""
        if self._packed is None or self._packed_rows(f"{modules[0][1]}.weight", *shapes[1]) is None:
            return None
        rows = [
            ([self._rows(name, *shapes[0]) for name in pair], self._rows(down, *shapes[1])) for pair, down in modules
        ]
        return grouped_experts(router, rows, self._config.activation.value, self._dtype)

    def _qkv(self, prefix: str) -> AdaptableProjection:
        config = self._config
        modules = [prefix + name for name in self._names.qkv]
        rows = [config.query_width, config.kv_width, config.kv_width]
        if not self._names.interleaves_heads:
            rows = rows if len(modules) == 3 else [sum(rows)]
            return self._linear(modules, rows, config.hidden_size, config.has_qkv_bias)
        rows_in_all = 3 * config.query_width
        bias = self._tensor(f"{modules[0]}.bias", rows_in_all) if config.has_qkv_bias else None
        bias = None if bias is None else _heads_to_qkv(bias, config)
        weight = self._rows(modules[0], rows_in_all, config.hidden_size).changed(lambda x: _heads_to_qkv(x, config))
        return self._product(modules, [weight], bias)

    def _linear(
        self,
        modules: Sequence[str],
        rows: Sequence[int],
        in_width: int,
        has_bias: bool,
        then: _Nonlinearity = _NONE,
    ) -> AdaptableProjection:
        """Stack the weights of modules that read the same input."""
        bias = None
        if has_bias:
            bias = torch.cat([self._tensor(f"{name}.bias", n) for name, n in zip(modules, rows, strict=True)])
        from_files = self._file_product(modules, rows, in_width, bias, then)
        if from_files is not None:
            return from_files
        weights = [self._rows(name, count, in_width) for name, count in zip(modules, rows, strict=True)]
        return self._product(modules, weights, bias, then)

    def _file_product(
        self, modules: Sequence[str], rows: Sequence[int], in_width: int, bias: Tensor | None, then: _Nonlinearity
    ) -> AdaptableProjection | None:
        """Return the product of stacked modules, packed from their files; None where the kernels pack none such."""
        source = self._files
        if source is None or not packs_files(source.dtype, in_width, is_int8=self._is_int8):
            return None
        parts = file_parts(source, [f"{name}.weight" for name in modules], [(count, in_width) for count in rows])
        if parts is None:
            return None
        try:
            product = file_product(parts, bias, source.dtype, *then, is_int8=self._is_int8)
        except OSError as error:
            where = ", ".join(dict.fromkeys(str(part.path) for part in parts))
            raise ModelError(f"{where}: {modules[0]} cannot be read: {error}") from error
        except NotFiniteError as error:
            raise _not_quantizable(modules[0], str(error)) from error
        self._count(sum(rows) * in_width, source.dtype)
        return product

    def _rows(self, module: str, count: int, in_width: int) -> Rows:
        packed = self._packed_rows(f"{module}.weight", count, in_width)
        return PlainRows(self._tensor(f"{module}.weight", count, in_width)) if packed is None else packed

    def _packed_rows(self, name: str, count: int, in_width: int) -> Rows | None:
        if self._packed is None:
            return None
        rows = self._packed.packed(name, (count, in_width))
        if rows is not None:
            self._count(count * in_width, self._packed.dtype)  # as unpacked, by which the whole is known
        return rows

    def _product(
        self, modules: Sequence[str], weights: Sequence[Rows], bias: Tensor | None, then: _Nonlinearity = _NONE
    ) -> AdaptableProjection:
        plain = [weight.rows for weight in weights if isinstance(weight, PlainRows)]
        if len(plain) == len(weights):
            return self._projected(modules[0], torch.cat(plain) if len(plain) > 1 else plain[0], bias, then)
        return packed_product(weights, bias, self._dtype, then.activation, then.is_gated)

    def _projected(
        self, name: str, weight: Tensor, bias: Tensor | None = None, then: _Nonlinearity = _NONE
    ) -> AdaptableProjection:
        if not self._is_int8:
            return Linear(weight, bias, activation=then.activation, is_gated=then.is_gated)
        obstacle = int8_obstacle(weight)
        if obstacle is not None:
            raise _not_quantizable(name, obstacle)
        return Int8Linear(weight, bias, activation=then.activation, is_gated=then.is_gated)

    def _projection(self, name: str, rows: int) -> Projection:
        columns = self._config.embedding_size + self._config.hidden_size - rows
        return self._linear([self._prefix + name], [rows], columns, has_bias=False)

    def _head(self, embedding: Tensor) -> Projection:
        config = self._config
        found = find_head(self._names, self._source.has)
        stored = self._prefix + self._names.embedding if config.ties_embeddings else found
        packed = self._packed_rows(f"{stored}.weight", config.vocab_size, config.embedding_size)
        if packed is not None:
            return self._product([stored], [packed], None)
        if config.ties_embeddings:
            return self._projected("lm_head", embedding)
        from_files = self._file_product([found], [config.vocab_size], config.embedding_size, None, _NONE)
        if from_files is not None:
            return from_files
        return self._projected("lm_head", self._tensor(f"{found}.weight", config.vocab_size, config.embedding_size))

    def _head_norms(self, prefix: str) -> HeadNorms:
        config, names = self._config, self._names
        queries, keys = (
            self._norm_weight(prefix + module, config.head_dim) for module in (names.query_norm, names.key_norm)
        )
        return HeadNorms(queries, keys, config.norm_eps, self._dtype)

    def _norm(self, module: str) -> Norm:
        width = self._config.hidden_size
        weight = self._norm_weight(module, width)
        if self._config.norm is not NormKind.LAYER:
            return RmsNorm(weight, self._config.norm_eps, self._dtype)
        return LayerNorm(weight, self._tensor(f"{module}.bias", width), self._config.norm_eps)

    def _norm_weight(self, module: str, width: int) -> Tensor:
        weight = self._tensor(f"{module}.weight", width)
        # Near 1, a bfloat16 keeps 8 bits of the small number that is added.
        return weight.float() + 1.0 if self._config.norm is NormKind.RMS_PLUS_ONE else weight

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._source.tensor(name, shape)
        self._count(tensor.numel(), tensor.dtype)
        return tensor

    def _count(self, num_values: int, dtype: torch.dtype) -> None:
        if self._observer is not None:
            self._observer.tensor_read(num_values * dtype.itemsize)


def leave_rounded_rows_unwritten(weights: DecoderWeights, config: ModelConfig) -> None:
    """Let norms and gates write no more than what products in FP8 read: of a model that no request has adapters for,
    which are multiplied by the rows themselves."""
    embedding = weights.embedding
    unread = torch.full((1, 1), math.nan, dtype=embedding.dtype, device=embedding.device)
    for layer in weights.layers if config.is_norm_first else ():
        _round_on_the_way(layer, unread)


def _round_on_the_way(weights: LayerWeights, unread: Tensor | None = None) -> None:
    """Let norms and gates round what products in FP8 read as they compute it, which a GPU then reads once less."""
    if isinstance(weights.qkv, Float8Linear):
        weights.attention_norm.round_results(unread)
    if isinstance(weights.mlp, FeedForwardPart) and isinstance(weights.mlp.gate_up, Float8Linear):
        weights.mlp_norm.round_results(unread)
        if isinstance(weights.mlp.down, Float8Linear):
            weights.mlp.gate_up.round_results(unread)


def has_experts_apart(device: torch.device) -> bool:
    """Return whether each expert is a product of its own; on a GPU all are computed together."""
    return device.type == "cpu"


def _not_quantizable(name: str, obstacle: str) -> ModelError:
    return ModelError(f"{name} cannot be packed with 8 bits: {obstacle}; leave model.quantization unset.")


def _heads_to_qkv(rows: Tensor, config: ModelConfig) -> Tensor:
    """Reorder rows from [num_heads, 3, head_dim] to [3, num_heads, head_dim]."""
    shape = (config.num_heads, 3, config.head_dim, -1)
    return rows.view(shape).transpose(0, 1).reshape(rows.shape)
