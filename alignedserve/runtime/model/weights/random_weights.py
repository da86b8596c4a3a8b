"""Random weights of a model's shapes, for benchmarks and tests."""

import math

import torch
from torch import Tensor

from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.sharding.layer_stages import LayerStage
from alignedserve.runtime.model.sharding.sharded_weights import WholeSource, assemble_shard, assemble_stage
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weights.decoder_weights import DecoderWeights
from alignedserve.runtime.model.weights.feed_forward_weights import ExpertReading, LayerExperts
from alignedserve.runtime.model.weights.product_reader import LoadingObserver
from alignedserve.runtime.model.weights.weight_loader import StageReading, assemble_experts


class RandomSource:
    """Normally distributed weights, ones and zeros where a norm or a bias has them; any name, any shape."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._dtype = dtype
        self._device = device

    def has(self, name: str) -> bool:
        return not name.startswith("decoder.")

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        if len(shape) < 2:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        deviation = 1.0 / math.sqrt(shape[1])
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        return values.normal_(0.0, deviation, generator=self._generator)


def random_weights(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantization: str | None = None,
    *,
    observer: LoadingObserver | None = None,
    shard: TensorShard | None = None,
    stage: LayerStage | None = None,
    sharing: ExpertReading | None = None,
) -> DecoderWeights:
    """Make random weights of the model's shapes, the same for the same seed, or a `shard` or `stage` of these, or by
    `sharing` with one process's experts.

    No files needed.
    """
    source = WholeSource(RandomSource(seed, dtype, torch.device(device)), dtype)
    if stage is not None:
        reading = StageReading(stage, dtype, torch.device(device), reads_all=True)
        return assemble_stage(config, source, quantization, observer, reading)
    sharing = None if sharing is None else sharing._replace(reads_all=True)
    return assemble_shard(config, source, quantization, observer, shard, sharing)


def random_experts(
    config: ModelConfig, seed: int, dtype: torch.dtype, quantization: str | None, sharing: ExpertReading
) -> LayerExperts:
    """Make the experts alone of such weights that one process has, by layer."""
    tensors = RandomSource(seed, dtype, torch.device("cpu"))
    return assemble_experts(config, tensors, quantization, sharing._replace(reads_all=True), dtype)
