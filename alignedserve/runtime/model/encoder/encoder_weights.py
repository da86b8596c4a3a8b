"""Loads the weights of an encoder and of what follows its pooling."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from alignedserve.runtime.model.encoder.encoder_config import DenseConfig, EncoderConfig, HeadActivation
from alignedserve.runtime.model.weight_names import read_names
from alignedserve.runtime.model.weights.product_reader import LoadingObserver, Nonlinearity, ProductReader
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weights.weight_source import RandomSource, WeightSource
from kernels.activation import LayerNorm, Norm
from kernels.feed_forward import FeedForwardPart
from kernels.linear import AdaptableProjection, Linear, Projection

_SEED = 0


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Modules of one family; those of a layer follow `layer`, all but the head's `prefix` where files have it."""

    prefix: str
    layer: str
    qkv: tuple[str, str, str]
    output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    head_dense: str  # of a cross-encoder
    head_activation: HeadActivation  # after it
    head_out: str
    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    segments: str = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"


ENCODER_NAMES = read_names(Path(__file__).with_name("encoder_names.json"), EncoderNames)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer: norms follow the sums of parts and inputs."""

    qkv: Projection  # [3 * hidden_size, hidden_size]
    output: Projection
    attention_norm: Norm
    mlp: FeedForwardPart
    mlp_norm: Norm


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A product after pooling, and its nonlinearity."""

    product: Projection
    activation: HeadActivation


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """A whole encoder, on one device and in one dtype."""

    words: Tensor  # [vocab_size, hidden_size]
    positions: Tensor  # [max_position_embeddings, hidden_size]: a prompt's first token has row 0
    token_types: Tensor | None  # [num_token_types, hidden_size]
    norm: Norm
    layers: tuple[EncoderLayer, ...]
    head: tuple[DenseLayer, ...]  # after pooling


def load_encoder_weights(
    folder: Path | None,
    config: EncoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    *,
    observer: LoadingObserver | None = None,
) -> EncoderWeights:
    """Load the weights in `folder` as `dtype`; None: random ones. Raises as `load_weights`."""

    def source_of(inner: str) -> WeightSource:
        return (
            RandomSource(_SEED, dtype, device) if folder is None else SafetensorsSource(folder / inner, dtype, device)
        )

    return _Assembler(config, source_of, is_int8=quantization == "int8", observer=observer).weights()


class _Assembler:
    def __init__(
        self,
        config: EncoderConfig,
        source_of: Callable[[str], WeightSource],
        *,
        is_int8: bool,
        observer: LoadingObserver | None,
    ) -> None:
        self._config, self._source_of, self._source = config, source_of, source_of("")
        self._read, self._observer = ProductReader(self._source, observer, is_int8=is_int8), observer
        self._names = ENCODER_NAMES[config.family.value]
        has_prefix = self._source.has(f"{self._names.prefix}{self._names.words}.weight")
        self._prefix = self._names.prefix if has_prefix else ""

    def weights(self) -> EncoderWeights:
        config, names, prefix = self._config, self._names, self._prefix
        width = config.hidden_size
        positions = self._read.tensor(f"{prefix}{names.positions}.weight", config.num_positions, width)
        types = None
        if config.num_token_types:
            types = self._read.tensor(f"{prefix}{names.segments}.weight", config.num_token_types, width)
        return EncoderWeights(
            words=self._read.tensor(f"{prefix}{names.words}.weight", config.vocab_size, width),
            positions=positions[config.position_offset :][: config.max_position_embeddings],
            token_types=types,
            norm=self._norm(prefix + names.norm),
            layers=tuple(self._layer(layer) for layer in range(config.num_layers)),
            head=self._score_head() if config.score is not None else self._dense_layers(),
        )

    def _layer(self, number: int) -> EncoderLayer:
        config, names = self._config, self._names
        prefix, width = self._prefix + names.layer.format(layer=number), config.hidden_size
        layer = EncoderLayer(
            qkv=self._linear([prefix + name for name in names.qkv], width, width),
            output=self._linear([prefix + names.output], width, width),
            attention_norm=self._norm(prefix + names.attention_norm),
            mlp=FeedForwardPart(
                self._linear([prefix + names.up], config.intermediate_size, width, config.activation.value),
                self._linear([prefix + names.down], width, config.intermediate_size),
            ),
            mlp_norm=self._norm(prefix + names.mlp_norm),
        )
        if self._observer is not None:
            self._observer.layer_packed()
        return layer

    def _score_head(self) -> tuple[DenseLayer, ...]:
        names, width = self._names, self._config.hidden_size
        assert self._config.score is not None, "an encoder of texts has no score"
        return (
            self._dense(self._source, names.head_dense, DenseConfig("", width, width, True, names.head_activation)),
            self._dense(self._source, names.head_out, DenseConfig("", width, 1, True, self._config.score)),
        )

    def _dense_layers(self) -> tuple[DenseLayer, ...]:
        layers = self._config.embedding.dense
        return tuple(self._dense(self._source_of(dense.folder), "linear", dense) for dense in layers)

    def _dense(self, source: WeightSource, name: str, dense: DenseConfig) -> DenseLayer:
        weight = source.tensor(f"{name}.weight", (dense.out_width, dense.in_width)).float()
        bias = source.tensor(f"{name}.bias", (dense.out_width,)).float() if dense.has_bias else None
        return DenseLayer(Linear(weight, bias), dense.activation)

    def _linear(
        self, modules: list[str], rows: int, in_width: int, activation: str | None = None
    ) -> AdaptableProjection:
        weights = [self._read.rows(name, rows, in_width) for name in modules]
        bias = torch.cat([self._read.tensor(f"{name}.bias", rows) for name in modules])
        return self._read.product(modules, weights, bias, Nonlinearity(activation))

    def _norm(self, module: str) -> Norm:
        width = self._config.hidden_size
        weight, bias = self._read.tensor(f"{module}.weight", width), self._read.tensor(f"{module}.bias", width)
        return LayerNorm(weight, bias, self._config.norm_eps)
