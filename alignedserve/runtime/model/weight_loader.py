"""Assembles the weights of a model out of the tensors of a source."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.decoder_weights import DecoderWeights, LayerWeights, round_on_the_way
from alignedserve.runtime.model.exact_tensors import exact_tensor
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.file_products import FileSource, NotFiniteError, file_parts, file_product, packs_files
from alignedserve.runtime.model.head_order import heads_to_qkv, pairs_apart
from alignedserve.runtime.model.model_config import ExpertConfig, HeadNormKind, ModelConfig, NormKind, Scoring
from alignedserve.runtime.model.packed_experts import grouped_experts
from alignedserve.runtime.model.packed_products import PlainRows, Rows, packed_product
from alignedserve.runtime.model.row_lookup import LookupSource, RowLookup
from alignedserve.runtime.model.weight_names import ParameterNames, find_head, find_prefix
from kernels.cpu.int8_linear import Int8Linear, int8_obstacle
from kernels.feed_forward import (
    ExpertRouter,
    Experts,
    FeedForwardPart,
    GroupRouter,
    Router,
    WithSharedExpert,
)
from kernels.linear import AdaptableProjection, Linear, Projection
from kernels.norm import LayerNorm, NoNorm, Norm, RmsNorm
from kernels.rotary import HeadNorms
from kernels.sorted_experts import SortedExperts, stacked_experts


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
        self._names = forms.packed.names if forms.packed else FAMILIES[config.family].names
        self._prefix = find_prefix(self._names, source.has)
        self._dtype, self._device = torch.float32, torch.device("cpu")  # of the weights; known when the first is read

    def weights(self) -> DecoderWeights:
        config, names = self._config, self._names
        embedding = self._embedding(f"{self._prefix}{names.embedding}.weight", config.vocab_size, config.embedding_size)
        self._dtype, self._device = embedding.dtype, embedding.device
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
            round_on_the_way(weights)
        if self._observer is not None:
            self._observer.layer_packed()
        return weights

    def _layer(self, layer: int) -> LayerWeights:
        config, names = self._config, self._names
        prefix = self._prefix + names.layer.format(layer=layer)
        experts = config.experts_of(layer)
        return LayerWeights(
            attention_norm=self._input_norm(prefix + names.attention_norm),
            qkv=self._qkv(prefix),
            head_norms=self._head_norms(prefix),
            output=self._linear(
                [prefix + names.output], [config.hidden_size], config.query_width, config.has_output_bias
            ),
            mlp_norm=self._input_norm(prefix + names.mlp_norm),
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
        names, chosen = self._names, self._chosen_experts(prefix, experts)
        if not experts.shared_size:
            return chosen
        modules = [prefix + name for name in names.shared_gate_up]
        shared = self._feed_forward(modules, prefix + names.shared_down, experts.shared_size)
        gate = None
        if experts.has_shared_gate:
            gate = Linear(self._tensor(f"{prefix}{names.shared_gate}.weight", 1, self._config.hidden_size))
        return WithSharedExpert(chosen, shared, gate)

    def _router(self, prefix: str, experts: ExpertConfig) -> Router:
        names = self._names
        weight = self._tensor(f"{prefix}{names.router}.weight", experts.num_experts, self._config.hidden_size)
        if experts.scoring is Scoring.SOFTMAX:
            return ExpertRouter(weight, experts.num_chosen, normalises=experts.normalises)
        return GroupRouter(
            weight,
            exact_tensor(self._source, prefix + names.router_correction, (experts.num_experts,)),
            experts.num_chosen,
            normalises=experts.normalises,
            scale=experts.scale,
            groups=(experts.num_groups, experts.num_chosen_groups),
        )

    def _chosen_experts(self, prefix: str, experts: ExpertConfig) -> Projection:
        config, names, router = self._config, self._names, self._router(prefix, experts)
        inner, modules = experts.intermediate_size, []
        for index in range(experts.num_experts):
            gate_up = [prefix + name.format(expert=index) for name in names.expert_gate_up]
            modules.append((gate_up, prefix + names.expert_down.format(expert=index)))
        if has_experts_apart(self._device):
            return Experts(router, [self._feed_forward(gate_up, down, inner) for gate_up, down in modules])
        shapes = ((2 * inner // len(names.expert_gate_up), config.hidden_size), (config.hidden_size, inner))
        packed = self._packed_experts(router, modules, shapes)
        if packed is not None:
            return packed
        gate_ups = [torch.cat([self._tensor(f"{name}.weight", *shapes[0]) for name in pair]) for pair, _ in modules]
        downs = [self._tensor(f"{down}.weight", *shapes[1]) for _, down in modules]
        return stacked_experts(router, torch.stack(gate_ups), torch.stack(downs), config.activation.value)

    def _packed_experts(
        self, router: Router, modules: Sequence[tuple[list[str], str]], shapes: Sequence[tuple[int, int]]
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
        if self._names.interleaves_pairs:
            return self._paired_qkv(modules, rows)
        if not self._names.interleaves_heads:
            rows = rows if len(modules) == 3 else [sum(rows)]
            return self._linear(modules, rows, config.hidden_size, config.has_qkv_bias)
        rows_in_all = 3 * config.query_width
        bias = self._tensor(f"{modules[0]}.bias", rows_in_all) if config.has_qkv_bias else None
        bias = None if bias is None else heads_to_qkv(bias, config)
        weight = self._rows(modules[0], rows_in_all, config.hidden_size).changed(lambda x: heads_to_qkv(x, config))
        return self._product(modules, [weight], bias)

    def _paired_qkv(self, modules: Sequence[str], rows: Sequence[int]) -> AdaptableProjection:
        """Put the rows of each rotated pair half a head apart, as the kernels have them."""
        config = self._config
        weights = [self._rows(name, count, config.hidden_size) for name, count in zip(modules, rows, strict=True)]
        weights[:2] = [weight.changed(lambda part: pairs_apart(part, config)) for weight in weights[:2]]
        bias = None
        if config.has_qkv_bias:
            parts = [self._tensor(f"{name}.bias", count) for name, count in zip(modules, rows, strict=True)]
            bias = torch.cat([*(pairs_apart(part, config) for part in parts[:2]), *parts[2:]])
        return self._product(modules, weights, bias)

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

    def _embedding(self, name: str, vocab_size: int, width: int) -> RowLookup:
        looked_up = None
        if isinstance(self._packed, LookupSource):
            looked_up = self._packed.looked_up(name, (vocab_size, width))
        if looked_up is None:
            return self._tensor(name, vocab_size, width)
        self._count(vocab_size * width, looked_up.dtype)  # as unpacked, by which the whole is known
        return looked_up

    def _head(self, embedding: RowLookup) -> Projection:
        config = self._config
        found = find_head(self._names, self._source.has)
        stored = self._prefix + self._names.embedding if config.ties_embeddings else found
        packed = self._packed_rows(f"{stored}.weight", config.vocab_size, config.embedding_size)
        if packed is not None:
            return self._product([stored], [packed], None)
        if config.ties_embeddings:
            assert isinstance(embedding, Tensor), "rows that are packed for looking them up alone"
            return self._projected("lm_head", embedding)
        from_files = self._file_product([found], [config.vocab_size], config.embedding_size, None, _NONE)
        if from_files is not None:
            return from_files
        return self._projected("lm_head", self._tensor(f"{found}.weight", config.vocab_size, config.embedding_size))

    def _head_norms(self, prefix: str) -> HeadNorms | None:
        config, names, kind = self._config, self._names, self._config.head_norm
        if kind is HeadNormKind.NONE:
            return None
        is_whole = kind is HeadNormKind.WHOLE
        widths = (config.query_width, config.kv_width) if is_whole else (config.head_dim, config.head_dim)
        queries, keys = (
            self._norm_weight(prefix + module, width)
            for module, width in zip((names.query_norm, names.key_norm), widths, strict=True)
        )
        is_after = kind is HeadNormKind.ROTATED_HEADS
        return HeadNorms(queries, keys, config.norm_eps, self._dtype, is_whole=is_whole, is_after_rotation=is_after)

    def _input_norm(self, module: str) -> Norm:
        return self._norm(module) if self._config.has_input_norms else NoNorm()

    def _norm(self, module: str) -> Norm:
        width = self._config.hidden_size
        weight = self._norm_weight(module, width)
        if self._config.norm in (NormKind.RMS, NormKind.RMS_PLUS_ONE):
            return RmsNorm(weight, self._config.norm_eps, self._dtype)
        bias = self._tensor(f"{module}.bias", width) if self._config.norm is NormKind.LAYER else None
        return LayerNorm(weight, bias, self._config.norm_eps)

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


def has_experts_apart(device: torch.device) -> bool:
    """Return whether each expert is a product of its own; on a GPU all are computed together."""
    return device.type == "cpu"


def _not_quantizable(name: str, obstacle: str) -> ModelError:
    return ModelError(f"{name} cannot be packed with 8 bits: {obstacle}; leave model.quantization unset.")
