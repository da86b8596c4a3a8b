"""Assembles the weights of a whole model, or of one rank's share in it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.sharding.packed_regions import packed_region, tensor_region
from alignedserve.runtime.model.sharding.regions import Region, shard_regions
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from alignedserve.runtime.model.weight_names import ParameterNames
from alignedserve.runtime.model.weights.decoder_weights import DecoderWeights
from alignedserve.runtime.model.weights.exact_tensors import exact_tensor
from alignedserve.runtime.model.weights.feed_forward_weights import ExpertReading
from alignedserve.runtime.model.weights.file_products import FileSource
from alignedserve.runtime.model.weights.packed_products import Rows
from alignedserve.runtime.model.weights.product_reader import LoadingObserver, PackedSource, TensorSource
from alignedserve.runtime.model.weights.weight_loader import StageReading, assemble_weights
from kernels.cpu.packed_linear import FileRows


@runtime_checkable
class RegionSource(Protocol):
    """A source that reads a part of a tensor alone."""

    def region(self, name: str, region: Region) -> Tensor:
        """Return the part in its final dtype and on its device. Raises ModelError naming tensor and file."""


class ShardedSource:
    """See TensorSource, PackedSource and FileSource: whichever of them the whole source is, with shapes of the rank."""

    def __init__(
        self,
        source: TensorSource,
        regions: Mapping[str, Region],
        names: ParameterNames,
        dtype: torch.dtype,
        *,
        packed: PackedSource | None = None,
        files: FileSource | None = None,
    ) -> None:
        """`regions`: of tensors that the rank has in part. `packed`, `files`: the source again, if it is these."""
        self.names, self.dtype = names, dtype
        self._source, self._packed, self._files = source, packed, files
        self._regions = regions

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        region = self._regions.get(name)
        if region is None:
            return self._source.tensor(name, shape)
        if isinstance(self._source, RegionSource) and region.is_held:
            part = self._source.region(name, region)
        else:
            part = tensor_region(self._source.tensor(name, region.shape), region)
        assert part.shape == shape, f"{name}: the rank's part is {part.shape}, not {shape}"
        return part

    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert name not in self._regions, f"{name} is divided"
        return exact_tensor(self._source, name, shape)

    def packed(self, name: str, shape: tuple[int, ...]) -> Rows | None:
        if self._packed is None:
            return None
        region = self._regions.get(name)
        if region is None:
            return self._packed.packed(name, shape)
        whole = self._packed.packed(name, region.shape)
        return None if whole is None else packed_region(whole, region)

    def file_rows(self, name: str, shape: tuple[int, int]) -> FileRows | None:
        if self._files is None:
            return None
        region = self._regions.get(name)
        if region is None:
            return self._files.file_rows(name, shape)
        assert region.width is not None, f"{name} is a vector"
        whole = self._files.file_rows(name, (region.num_rows, region.width))
        if whole is None or region.columns is not None or len(region.rows) > 1:
            return None
        (rows,) = region.rows
        return whole._replace(
            offset=whole.offset + rows.start * region.width * whole.dtype.itemsize, num_rows=rows.size
        )


class WholeSource(NamedTuple):
    """The tensors of a whole model, and what their source is beside."""

    tensors: TensorSource
    dtype: torch.dtype
    packed: PackedSource | None = None  # the same source, if its matrices may be packed
    files: FileSource | None = None  # the same source, if its matrices need not be read before they are packed


def assemble_stage(
    config: ModelConfig,
    source: WholeSource,
    quantization: str | None,
    observer: LoadingObserver | None,
    stage: StageReading,
) -> DecoderWeights:
    tensors, _, packed, files = source
    return assemble_weights(config, tensors, quantization, packed=packed, files=files, observer=observer, stage=stage)


def assemble_shard(
    config: ModelConfig,
    source: WholeSource,
    quantization: str | None,
    observer: LoadingObserver | None,
    shard: TensorShard | None,
    sharing: ExpertReading | None = None,
) -> DecoderWeights:
    """Assemble what a rank holds, reading no more of the files where they allow it; None: the whole model,
    of whose experts one of several processes has some, by `sharing`.

    `config` of the whole model; otherwise as assemble_weights.
    """
    tensors, dtype, packed, files = source
    if shard is None:
        return assemble_weights(
            config, tensors, quantization, packed=packed, files=files, observer=observer, sharing=sharing
        )
    names = FAMILIES[config.family].names if packed is None else packed.names
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
