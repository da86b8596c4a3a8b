"""Weights drawn by their names, so that two devices have the same, of experts in the forms that files may have."""

import math
import zlib
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.runtime.model.decoder.decoder_parts import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    CheckpointQuantization,
    QuantMethod,
)
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.weights.packed_products import GroupedRows, Rows
from alignedserve.runtime.model.weights.weight_source import RandomSource, WeightSource
from kernels.narrow.grouped_linear import GroupedWeight, Numbers

_CPU = torch.device("cpu")
_FLOAT_SIZE, _HALF_SIZE, _BYTE_SIZE = 2.9, 4.6, 18.5  # deviations of numbers that are drawn
_BLOCK_GROUP, _SMALL_GROUP = 32, 16


class DrawnWeights(WeightSource):
    """A source of one model's weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_packed: bool) -> None:
        """`is_packed`: experts stay packed where the model's files are quantised."""
        super().__init__(dtype, device)
        self._is_packed, self._quantization = is_packed, config.stored_quantization

    @override
    def has(self, name: str) -> bool:
        return _source_of(name).has(name)

    @override
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        weight = self._narrow(name, shape)
        tensor = _source_of(name).tensor(name, shape) if weight is None else weight.unpacked(torch.float32)
        return tensor.to(self.device, self.dtype)

    @override
    def packed(self, name: str, shape: tuple[int, ...]) -> Rows | None:
        weight = self._narrow(name, shape) if self._is_packed else None
        return None if weight is None else GroupedRows(weight).moved(self.device)

    def _narrow(self, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        if self._quantization is None or ".experts." not in name or len(shape) != 2:
            return None
        return _narrow_weight(self._quantization, name, *shape)


def _source_of(name: str) -> RandomSource:
    return RandomSource(zlib.crc32(name.encode()), torch.float32, _CPU)


def _narrow_weight(quantization: CheckpointQuantization, name: str, rows: int, width: int) -> GroupedWeight:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    draw = partial(torch.randint, dtype=torch.uint8, generator=generator)
    if quantization.method is QuantMethod.BLOCKS:
        if "down" in name:  # as of Q6_K
            scales = torch.rand((rows, width // _SMALL_GROUP), generator=generator) / (_BYTE_SIZE * math.sqrt(width))
            zeros = torch.full_like(scales, 32, dtype=torch.uint8)
            return GroupedWeight(Numbers.INT8, draw(0, 64, (rows, width)), scales, zeros)
        scales = torch.rand((rows, width // _BLOCK_GROUP), generator=generator) / (_HALF_SIZE * math.sqrt(width))
        words = draw(0, 256, (rows, width // 2))
        return GroupedWeight(Numbers.INT4, words, scales, None, minima=-7.5 * scales)
    size, words = _FLOAT_SIZE * math.sqrt(width), draw(0, 256, (rows, width // 2))
    if quantization.has_float4(NVFP4_GROUP):
        small, factors = draw(0x30, 0x40, (rows, width // NVFP4_GROUP)), torch.full((rows,), 1.0 / size)
        return GroupedWeight(Numbers.NVFP4, words, small, None, factors)  # scales of 0.5 to 2
    exponent = 127 - round(math.log2(size))
    exponents = draw(exponent - 1, exponent + 2, (rows, width // MXFP4_GROUP))
    return GroupedWeight(Numbers.MXFP4, words, exponents, None)
