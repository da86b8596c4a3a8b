"""Loads the weights of a Hugging Face model folder, plain or quantised, or of a GGUF file."""

from pathlib import Path

import torch

from alignedserve.gguf.file import GgufFile, is_gguf
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.gguf.source import GgufSource
from alignedserve.runtime.model.quantized.source import QuantizedSource
from alignedserve.runtime.model.sharding.layer_stages import LayerStage
from alignedserve.runtime.model.sharding.sharded_weights import WholeSource, assemble_shard, assemble_stage
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weights.decoder_weights import DecoderWeights
from alignedserve.runtime.model.weights.feed_forward_weights import ExpertReading, LayerExperts
from alignedserve.runtime.model.weights.product_reader import LoadingObserver
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weights.weight_loader import StageReading, assemble_experts


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
    *,
    observer: LoadingObserver | None = None,
    shard: TensorShard | None = None,
    stage: LayerStage | None = None,
    sharing: ExpertReading | None = None,
) -> DecoderWeights:
    """Load the weights in `folder`, which may be a GGUF file, as `dtype`; of a `shard` or `stage`, its share of them,
    and by `sharing` that of one process of the experts.

    Those of linear layers with 8 bits when `quantization` is "int8".

    Matrices that the files have packed stay so where a kernel computes with them.

    Raises UnsafeWeights when there are only pickle-based files, ModelNotFound when a file is missing, ModelError
    naming the file that is truncated, the tensor that is missing or has the wrong shape or dtype, or the layer that
    cannot be packed with 8 bits.
    """
    source = _source(folder, config, dtype, torch.device(device))
    if stage is not None:
        reading = StageReading(stage, dtype, torch.device(device))
        return assemble_stage(config, source, quantization, observer, reading)
    return assemble_shard(config, source, quantization, observer, shard, sharing)


def load_experts(
    folder: Path, config: ModelConfig, dtype: torch.dtype, quantization: str | None, sharing: ExpertReading
) -> LayerExperts:
    """Load the experts alone that one process has, by layer. Raises as `load_weights`."""
    tensors, _, packed, files = _source(folder, config, dtype, torch.device("cpu"))
    return assemble_experts(config, tensors, quantization, sharing, dtype, packed=packed, files=files)


def _source(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> WholeSource:
    if is_gguf(folder):
        blocks = GgufSource(GgufFile(folder), config, dtype, device)
        return WholeSource(blocks, dtype, blocks, blocks)
    plain = SafetensorsSource(folder, dtype, device)
    if config.stored_quantization is None:
        return WholeSource(plain, dtype, None, plain)
    quantized = QuantizedSource(plain, config.stored_quantization, FAMILIES[config.family].names)
    return WholeSource(quantized, dtype, quantized, quantized)
