"""Loads the weights that a process computes with: of files, plain, quantised or GGUF, or drawn ones.

A source gives tensors by name, whatever the files are; a shard of the source gives the parts that a rank has; and
`assemble_weights` packs products of them."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from alignedserve.gguf.file import GgufFile, is_gguf
from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.gguf.source import GgufSource
from alignedserve.runtime.model.quantized.source import QuantizedSource
from alignedserve.runtime.model.sharding.layer_stages import LayerStage
from alignedserve.runtime.model.sharding.regions import shard_regions
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weights.feed_forward_weights import ExpertReading, LayerExperts
from alignedserve.runtime.model.weights.product_reader import LoadingObserver
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weights.weight_loader import (
    DecoderWeights,
    StageReading,
    assemble_experts,
    assemble_weights,
)
from alignedserve.runtime.model.weights.weight_source import RandomSource, ShardedSource, WeightSource


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The weights of the whole model."""

    config: ModelConfig  # for the context that is served
    folder: Path | None  # or GGUF file; None: random weights
    dtype: str  # of weights and computing
    quantization: str | None = None  # of linear layers: int8, or None
    seed: int = 0  # of random weights


def load_weights(
    folder: Path | None,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
    *,
    seed: int = 0,
    observer: LoadingObserver | None = None,
    shard: TensorShard | None = None,
    stage: LayerStage | None = None,
    sharing: ExpertReading | None = None,
) -> DecoderWeights:
    """Load the weights in `folder`, or of a GGUF file, as `dtype`; None: draw them, the same for the same seed. Of a
    `shard` or `stage` only its share, by `sharing` one process's experts. `quantization`: "int8" for linear layers.
    Matrices stay packed where a kernel computes with them. Raises UnsafeWeights, ModelNotFound, ModelError naming
    the file, tensor or layer."""
    source = _source(folder, config, dtype, torch.device(device), seed)
    if stage is not None:
        reading = StageReading(stage, reads_all=folder is None)
        return assemble_weights(config, source, quantization, observer=observer, stage=reading)
    if folder is None and sharing is not None:
        sharing = sharing._replace(reads_all=True)
    return assemble_shard(config, source, quantization, observer, shard, sharing)


def load_or_draw(
    model: ModelSpec,
    device: torch.device | str = "cpu",
    *,
    observer: LoadingObserver | None = None,
    shard: TensorShard | None = None,
    stage: LayerStage | None = None,
    sharing: ExpertReading | None = None,
) -> DecoderWeights:
    """Load or draw the weights of a model, or a share of them, as `load_weights` does."""
    return load_weights(
        model.folder,
        model.config,
        torch_dtype(model.dtype),
        device,
        model.quantization,
        seed=model.seed,
        observer=observer,
        shard=shard,
        stage=stage,
        sharing=sharing,
    )


def load_experts(model: ModelSpec, sharing: ExpertReading) -> LayerExperts:
    """Load or draw the experts alone that one process has, by layer. Raises as `load_weights`."""
    source = _source(model.folder, model.config, torch_dtype(model.dtype), torch.device("cpu"), model.seed)
    sharing = sharing if model.folder is not None else sharing._replace(reads_all=True)
    return assemble_experts(model.config, source, model.quantization, sharing)


def assemble_shard(
    config: ModelConfig,
    source: WeightSource,
    quantization: str | None = None,
    observer: LoadingObserver | None = None,
    shard: TensorShard | None = None,
    sharing: ExpertReading | None = None,
) -> DecoderWeights:
    """Assemble a rank's share, or all, reading no more of the files than it must. `config` of the whole model."""
    if shard is None:
        return assemble_weights(config, source, quantization, observer=observer, sharing=sharing)
    regions = shard_regions(config, source.names or FAMILIES[config.family].names, source.has, shard)
    local = replace(shard.local(config), vocab_size=shard.tokens(config).size)
    return assemble_weights(local, ShardedSource(source, regions), quantization, observer=observer)


def _source(
    folder: Path | None, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> WeightSource:
    if folder is None:
        return RandomSource(seed, dtype, device)
    if is_gguf(folder):
        return GgufSource(GgufFile(folder), config, dtype, device)
    plain = SafetensorsSource(folder, dtype, device)
    return plain if config.stored_quantization is None else QuantizedSource(plain, config.stored_quantization)
