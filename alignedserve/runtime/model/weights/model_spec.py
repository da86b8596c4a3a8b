"""Says which weights a process computes with, those of files or drawn ones, and makes them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.sharding.layer_stages import LayerStage
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weights.decoder_weights import DecoderWeights
from alignedserve.runtime.model.weights.feed_forward_weights import ExpertReading
from alignedserve.runtime.model.weights.product_reader import LoadingObserver
from alignedserve.runtime.model.weights.random_weights import random_weights
from alignedserve.runtime.model.weights.weight_files import load_weights


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The weights of the whole model."""

    config: ModelConfig  # for the context that is served
    folder: Path | None  # or GGUF file; None: random weights
    dtype: str  # of weights and computing
    quantization: str | None = None  # of linear layers: int8, or None
    seed: int = 0  # of random weights


def load_or_draw(
    model: ModelSpec,
    device: torch.device | str = "cpu",
    *,
    observer: LoadingObserver | None = None,
    shard: TensorShard | None = None,
    stage: LayerStage | None = None,
    sharing: ExpertReading | None = None,
) -> DecoderWeights:
    """Load a model's weights, or draw random ones; of a `shard` or `stage`, or by `sharing`, as `load_weights` does.

    Raises ModelError.
    """
    if model.folder is None:
        make = partial(random_weights, model.config, model.seed)
    else:
        make = partial(load_weights, model.folder, model.config)
    dtype = torch_dtype(model.dtype)
    return make(dtype, device, model.quantization, observer=observer, shard=shard, stage=stage, sharing=sharing)
