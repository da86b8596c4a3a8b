"""Assembles the weights of a whole model, or of one rank's share in it."""

from dataclasses import replace
from typing import NamedTuple

import torch

from alignedserve.runtime.model.file_products import FileSource
from alignedserve.runtime.model.model_config import ModelConfig
from alignedserve.runtime.model.sharding.regions import shard_regions
from alignedserve.runtime.model.sharding.sharded_source import ShardedSource
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weight_loader import (
    DecoderWeights,
    LoadingObserver,
    PackedSource,
    TensorSource,
    assemble_weights,
)
from alignedserve.runtime.model.weight_names import PARAMETER_NAMES


class WholeSource(NamedTuple):
    """The tensors of a whole model, and what their source is beside."""

    tensors: TensorSource
    dtype: torch.dtype
    packed: PackedSource | None = None  # the same source, if its matrices may be packed
    files: FileSource | None = None  # the same source, if its matrices need not be read before they are packed


def assemble_shard(
    config: ModelConfig,
    source: WholeSource,
    quantization: str | None,
    observer: LoadingObserver | None,
    shard: TensorShard | None,
) -> DecoderWeights:
    """Assemble what a rank holds, reading no more of the files where they allow it; None: the whole model.

    `config` of the whole model; otherwise as assemble_weights.
    """
    tensors, dtype, packed, files = source
    if shard is None:
        return assemble_weights(config, tensors, quantization, packed=packed, files=files, observer=observer)
    names = PARAMETER_NAMES[config.family] if packed is None else packed.names
    regions = shard_regions(config, names, tensors.has, shard)
    own = ShardedSource(tensors, regions, names, dtype, packed=packed, files=files)
    return assemble_weights(
        replace(shard.local(config), vocab_size=shard.tokens(config).size),
        own,
        quantization,
        packed=None if packed is None else own,
        files=None if files is None else own,
        observer=observer,
    )
