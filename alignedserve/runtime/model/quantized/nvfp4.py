"""Reads matrices of NVFP4: floats of 4 bits, a scale of FP8 for every 16 of them, and a float32 for the whole matrix.

Compressed-tensors divides by that float32 (`weight_global_scale`), NVIDIA's Model Optimizer multiplies by it
(`weight_scale_2`). A byte holds two neighbours, the lower half first.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.quantized.layout import StoredMatrix, nvfp4_names
from alignedserve.runtime.model.quantized.scheme import NVFP4_GROUP
from alignedserve.runtime.model.quantized.stored_blocks import apart
from alignedserve.runtime.model.weights.packed_products import GroupedRows
from kernels.narrow.grouped_linear import GroupedWeight, Numbers
from kernels.weight_blocks.block_values import FLOATS_OF_4_BITS

_FLOATS = torch.from_numpy(FLOATS_OF_4_BITS)
_CHUNK_VALUES = 1 << 22  # unpacked at a time: intermediate results are several times as large


class _Parts(NamedTuple):
    words: Tensor  # uint8 [rows, width / 2]
    scales: Tensor  # FP8 [rows, width / 16]
    whole: Tensor  # float32, by which scales are multiplied


def unpacked_nvfp4(matrix: StoredMatrix, read: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
    """Return the values [rows, width], computed in float32. Raises ModelError for scales that are not finite."""
    words, scales, whole = _read(matrix, read)
    values = torch.empty((matrix.rows, matrix.width), dtype=dtype)
    step = max(1, _CHUNK_VALUES // matrix.width)
    for first in range(0, matrix.rows, step):
        part = words[first : first + step]
        numbers = _FLOATS[torch.stack((part & 15, part >> 4), dim=-1).flatten(1).int()]
        sizes = scales[first : first + step].float() * whole
        values[first : first + step] = (numbers.view(len(part), -1, NVFP4_GROUP) * sizes[:, :, None]).flatten(1)
    return values


def read_nvfp4_groups(matrix: StoredMatrix, read: Callable[[str], Tensor]) -> GroupedRows:
    """Read a matrix as GPUs multiply by it. Raises ModelError for scales that are not finite."""
    words, scales, whole = _read(matrix, read)
    words = apart(words.view(matrix.rows, -1, NVFP4_GROUP)).flatten(1)
    factors = whole.expand(matrix.rows).clone()
    return GroupedRows(GroupedWeight(Numbers.NVFP4, words, scales.view(torch.uint8), None, factors))


def _read(matrix: StoredMatrix, read: Callable[[str], Tensor]) -> _Parts:
    words_name, whole_name, is_divisor = nvfp4_names(matrix)
    words, whole = read(f"{matrix.module}.{words_name}"), read(f"{matrix.module}.{whole_name}").float().reshape(())
    scales = read(f"{matrix.module}.weight_scale")
    whole = whole.reciprocal() if is_divisor else whole
    for name, found in (("weight_scale", scales.float()), (whole_name, whole)):
        if not bool(found.isfinite().all()):
            raise ModelError(f"{matrix.module}.{name} holds numbers that are not finite.")
    return _Parts(words, scales, whole)
