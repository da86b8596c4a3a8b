"""Loads the weights of the encoder by which a model sees, and of what makes prompt tokens of its patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from alignedserve.runtime.model.decoder.decoder_parts import NormKind
from alignedserve.runtime.model.weights.product_reader import pairs_of_rows_first
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weights.weight_source import RandomSource, WeightSource
from kernels.activation import Gated, LayerNorm, Norm, RmsNorm
from kernels.feed_forward import FeedForwardPart
from kernels.linear import AdaptableProjection, ClippedProducts, Linear, Projection, Ranges
from plugins.vision.forms import CHANNELS
from plugins.vision.vision_config import PairOrder, PositionKind, VisionConfig

_SEED = 1


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """One layer; each norm comes before its part."""

    attention_norm: Norm
    qkv: Projection  # [3 * hidden_size, hidden_size]
    output: Projection
    mlp_norm: Norm
    mlp: FeedForwardPart
    head_norms: tuple[Norm, Norm, Norm] | None = None  # of queries, keys and values
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Connector:
    """What makes prompt tokens of patches."""

    norm: Norm | None  # of patches, or of those that are joined
    merger: Projection | None  # [hidden_size, joined_width]
    products: tuple[Projection, ...]


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """A whole tower, on one device and in one dtype."""

    patches: Projection  # [hidden_size, patch_width]
    positions: Tensor | None  # [num_sides ** 2, hidden_size], and a row of the class token's
    class_token: Tensor | None  # [1, hidden_size]
    first_norm: Norm | None
    layers: tuple[VisionLayer, ...]
    last_norm: Norm | None
    connector: Connector
    deep: tuple[Connector, ...] = ()  # of inner layers
    standard: tuple[Tensor, Tensor] | None = None  # [hidden_size] what pooled patches lose, and are multiplied with


def load_vision_weights(
    folder: Path | None, config: VisionConfig, dtype: torch.dtype, device: torch.device
) -> VisionWeights:
    """Load the weights in `folder` as `dtype`; None: random ones. Raises ModelError naming file or tensor."""
    source: WeightSource
    source = RandomSource(_SEED, dtype, device) if folder is None else SafetensorsSource(folder, dtype, device)
    return _Assembler(config, source).weights()


class _Assembler:
    def __init__(self, config: VisionConfig, source: WeightSource) -> None:
        self._config, self._source = config, source
        of_both = [(prefix, inside) for prefix in config.names.prefixes for inside in config.names.inside]
        matching = (each for each in of_both if source.has(f"{each[0]}{each[1]}{config.names.patches}.weight"))
        self._prefix, inside = next(matching, of_both[0])
        self._names = config.names.within(inside)

    def weights(self) -> VisionWeights:
        config, names, width = self._config, self._names, self._config.hidden_size
        positions = class_token = None
        if config.num_sides is not None:
            shape = (2, config.num_sides) if config.positions is PositionKind.AXES else (config.num_positions,)
            positions = self._tensor(names.positions, *shape, width)
        if names.class_token:
            class_token = self._tensor(names.class_token, width)[None]
        return VisionWeights(
            patches=self._patches(),
            positions=positions,
            class_token=class_token,
            first_norm=self._norm(names.first_norm) if names.first_norm else None,
            layers=tuple(self._layer(names.layer.format(layer=number)) for number in range(config.num_layers)),
            last_norm=self._norm(names.last_norm) if names.last_norm else None,
            connector=self._connector(names.connector_norm, names.connector, joins=config.norms_joined),
            deep=tuple(self._deep_connector(level) for level in range(len(config.deep_layers))),
            standard=None if names.standard is None else self._standard(*names.standard),
        )

    def _patches(self) -> Projection:
        config, module = self._config, self._names.patches
        edge, width = config.patch_size, config.hidden_size
        bias = self._tensor(f"{module}.bias", width) if config.has_patch_bias else None
        if self._names.has_flat_patches:
            weight = self._tensor(f"{module}.weight", width, config.patch_width)
            if self._names.has_pixels_last:
                weight = weight.view(width, edge, edge, CHANNELS).permute(0, 3, 1, 2).reshape(width, -1)
            return Linear(weight, bias)
        if config.num_frames == 1:
            return Linear(self._tensor(f"{module}.weight", width, CHANNELS, edge, edge).reshape(width, -1), bias)
        kernel = self._tensor(f"{module}.weight", width, CHANNELS, config.num_frames, edge, edge)
        return Linear(kernel.float().sum(2).to(kernel.dtype).reshape(width, -1), bias)  # all frames are the picture

    def _layer(self, prefix: str) -> VisionLayer:
        config, names, width, inner = (
            self._config,
            self._names,
            self._config.hidden_size,
            self._config.intermediate_size,
        )
        up = self._linear(
            [prefix + name for name in names.up], inner, width, config.activation.value, is_gated=config.is_gated
        )
        return VisionLayer(
            attention_norm=self._norm(prefix + names.attention_norm),
            qkv=self._linear([prefix + name for name in names.qkv], 3 * width // len(names.qkv), width, num_turned=2),
            output=self._linear([prefix + names.output], width, width),
            mlp_norm=self._norm(prefix + names.mlp_norm),
            mlp=FeedForwardPart(up, self._linear([prefix + names.down], width, inner)),
            head_norms=self._head_norms(prefix) if config.has_head_norms else None,
            attention_post_norm=self._post_norm(prefix, names.attention_post_norm),
            mlp_post_norm=self._post_norm(prefix, names.mlp_post_norm),
        )

    def _head_norms(self, prefix: str) -> tuple[Norm, Norm, Norm]:
        config, names = self._config, self._names
        queries, keys = (
            self._turned(self._tensor(f"{prefix}{name}.weight", config.head_dim))
            for name in (names.query_norm, names.key_norm)
        )
        weights = (queries, keys, torch.ones_like(keys))
        first, second, third = (RmsNorm(weight, config.norm_eps, weight.dtype) for weight in weights)
        return first, second, third

    def _post_norm(self, prefix: str, module: str) -> Norm | None:
        return self._norm(prefix + module) if module else None

    def _standard(self, lost: str, factor: str) -> tuple[Tensor, Tensor]:
        width = self._config.hidden_size
        return self._tensor(lost, width), self._tensor(factor, width)

    def _turned(self, rows: Tensor) -> Tensor:
        pairs = self._names.pairs
        if pairs is PairOrder.ROWS_FIRST:
            return rows
        return pairs_of_rows_first(rows, self._config.head_dim, are_neighbours=pairs is PairOrder.NEIGHBOURS)

    def _deep_connector(self, level: int) -> Connector:
        names = self._names
        products = [name.format(level=level) for name in names.deep]
        return self._connector(names.deep_norm.format(level=level), products, joins=True)

    def _connector(self, norm_name: str, modules: Sequence[str], *, joins: bool) -> Connector:
        config, names = self._config, self._names
        norm = merger = None
        if norm_name:
            norm = self._connector_norm(norm_name, config.joined_width if joins else config.hidden_size)
        if names.merger:
            merger = Linear(self._tensor(f"{names.merger}.weight", config.hidden_size, config.joined_width))
        inner = [config.connector_width or config.out_width] * (len(modules) - 1)
        widths, products = [config.connected_width, *inner, config.out_width], []
        for number, name in enumerate(modules):
            weight = self._product_weight(name, widths[number + 1], widths[number])
            bias = self._tensor(f"{name}.bias", widths[number + 1]) if config.has_connector_bias else None
            activation = config.connector_activation if number < len(inner) else None
            products.append(Linear(weight, bias, activation=None if activation is None else activation.value))
        if config.has_unit_norm:
            ones = torch.ones(config.joined_width, dtype=weight.dtype, device=weight.device)
            norm = RmsNorm(ones, config.connector_eps, ones.dtype)
        return Connector(norm, merger, tuple(products))

    def _product_weight(self, name: str, rows: int, width: int) -> Tensor:
        if self._names.transposes_connector:
            return self._tensor(name, width, rows).t().contiguous()
        return self._tensor(f"{name}.weight", rows, width)

    def _connector_norm(self, module: str, width: int) -> Norm:
        config, weight = self._config, self._tensor(f"{module}.weight", width)
        if config.connector_norm is NormKind.LAYER:
            return LayerNorm(weight, self._tensor(f"{module}.bias", width), config.connector_eps)
        if config.connector_norm is NormKind.RMS_PLUS_ONE:
            return RmsNorm(weight.float() + 1.0, config.connector_eps, weight.dtype)
        return RmsNorm(weight, config.connector_eps, weight.dtype)

    def _linear(
        self,
        modules: Sequence[str],
        rows: int,
        in_width: int,
        activation: str | None = None,
        *,
        is_gated: bool = False,
        num_turned: int = 0,
    ) -> AdaptableProjection:
        weights = [self._tensor(f"{name}.weight", rows, in_width) for name in modules]
        biases = [self._tensor(f"{name}.bias", rows) for name in modules] if self._config.has_bias else []
        if len(modules) > 1:  # a single module of all rows has queries and keys in the tower's order
            for parts in (weights, biases):
                parts[:num_turned] = [self._turned(part) for part in parts[:num_turned]]
        if self._config.is_clipped:
            return self._clipped(modules, weights, activation)
        bias = torch.cat(biases) if biases else None
        return Linear(torch.cat(weights), bias, activation=activation, is_gated=is_gated)

    def _clipped(self, modules: Sequence[str], weights: Sequence[Tensor], activation: str | None) -> ClippedProducts:
        products = [(Linear(weight), self._ranges(name)) for name, weight in zip(modules, weights, strict=True)]
        gated = None if activation is None else Gated(activation, weights[0].dtype, weights[0].device)
        return ClippedProducts(products, gated)

    def _ranges(self, module: str) -> Ranges:
        prefix = module.removesuffix(".linear")
        bounds = [self._tensor(f"{prefix}.{side}_{end}") for side in ("input", "output") for end in ("min", "max")]
        return Ranges(*(bound.item() for bound in bounds))

    def _norm(self, module: str) -> Norm:
        config, width = self._config, self._config.hidden_size
        weight = self._tensor(f"{module}.weight", width)
        if config.norm is NormKind.RMS:
            return RmsNorm(weight, config.norm_eps, weight.dtype)
        return LayerNorm(weight, self._tensor(f"{module}.bias", width), config.norm_eps)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._source.tensor(self._prefix + name, shape)
