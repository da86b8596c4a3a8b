"""Loads the weights of the encoder by which a model sees, and of what makes prompt tokens of its patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from alignedserve.pictures.form import CHANNELS
from alignedserve.runtime.model.model_config import NormKind
from alignedserve.runtime.model.vision.vision_config import VisionConfig
from alignedserve.runtime.model.weights.head_order import pairs_of_rows_first
from alignedserve.runtime.model.weights.product_reader import TensorSource
from alignedserve.runtime.model.weights.random_weights import RandomSource
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from kernels.feed_forward import FeedForwardPart
from kernels.linear import Linear, Projection
from kernels.norm import LayerNorm, Norm, RmsNorm

_SEED = 1


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """One layer; its norms come before what they normalise for."""

    attention_norm: Norm
    qkv: Projection  # [3 * hidden_size, hidden_size]
    output: Projection
    mlp_norm: Norm
    mlp: FeedForwardPart


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


def load_vision_weights(
    folder: Path | None, config: VisionConfig, dtype: torch.dtype, device: torch.device
) -> VisionWeights:
    """Load the weights in `folder` as `dtype`; None: random ones. Raises ModelError naming file or tensor."""
    source: TensorSource
    source = RandomSource(_SEED, dtype, device) if folder is None else SafetensorsSource(folder, dtype, device)
    return _Assembler(config, source).weights()


class _Assembler:
    def __init__(self, config: VisionConfig, source: TensorSource) -> None:
        self._config, self._source = config, source
        of_both = [(prefix, inside) for prefix in config.names.prefixes for inside in config.names.inside]
        found = (each for each in of_both if source.has(f"{each[0]}{each[1]}{config.names.patches}.weight"))
        self._prefix, inside = next(found, of_both[0])
        self._names = config.names.within(inside)

    def weights(self) -> VisionWeights:
        config, names, width = self._config, self._names, self._config.hidden_size
        positions = class_token = None
        if config.num_sides is not None:
            positions = self._tensor(names.positions, config.num_positions, width)
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
        )

    def _patches(self) -> Projection:
        config, module = self._config, self._names.patches
        edge, width = config.patch_size, config.hidden_size
        bias = self._tensor(f"{module}.bias", width) if config.has_patch_bias else None
        if self._names.has_flat_patches:
            return Linear(self._tensor(f"{module}.weight", width, config.patch_width), bias)
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
            qkv=self._qkv([prefix + name for name in names.qkv]),
            output=self._linear([prefix + names.output], width, width),
            mlp_norm=self._norm(prefix + names.mlp_norm),
            mlp=FeedForwardPart(up, self._linear([prefix + names.down], width, inner)),
        )

    def _qkv(self, modules: Sequence[str]) -> Linear:
        config, width = self._config, self._config.hidden_size
        weight, bias = self._stacked(modules, 3 * width // len(modules), width)
        if self._names.interleaves_pairs:
            for rows in (weight, bias):
                if rows is not None:
                    rows[: 2 * width] = pairs_of_rows_first(rows[: 2 * width], config.head_dim)
        return Linear(weight, bias)

    def _deep_connector(self, level: int) -> Connector:
        names = self._names
        products = [name.format(level=level) for name in names.deep]
        return self._connector(names.deep_norm.format(level=level), products, joins=True)

    def _connector(self, norm_name: str, modules: Sequence[str], *, joins: bool) -> Connector:
        """Load a connector whose norm is of joined patches (`joins`) or of each."""
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
        self, modules: Sequence[str], rows: int, in_width: int, activation: str | None = None, *, is_gated: bool = False
    ) -> Linear:
        weight, bias = self._stacked(modules, rows, in_width)
        return Linear(weight, bias, activation=activation, is_gated=is_gated)

    def _stacked(self, modules: Sequence[str], rows: int, in_width: int) -> tuple[Tensor, Tensor | None]:
        """Stack weights and biases of modules that read the same input."""
        weight = torch.cat([self._tensor(f"{name}.weight", rows, in_width) for name in modules])
        if not self._config.has_bias:
            return weight, None
        return weight, torch.cat([self._tensor(f"{name}.bias", rows) for name in modules])

    def _norm(self, module: str) -> Norm:
        config, width = self._config, self._config.hidden_size
        weight = self._tensor(f"{module}.weight", width)
        if config.norm is NormKind.RMS:
            return RmsNorm(weight, config.norm_eps, weight.dtype)
        return LayerNorm(weight, self._tensor(f"{module}.bias", width), config.norm_eps)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        return self._source.tensor(self._prefix + name, shape)
