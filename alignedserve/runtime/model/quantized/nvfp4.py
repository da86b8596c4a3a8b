"""Reads matrices of NVFP4: floats of 4 bits, a scale of FP8 for every 16 of them, and a float32 for the whole matrix.

Compressed-tensors divides by that float32 (`weight_global_scale`), NVIDIA's Model Optimizer multiplies by it
(`weight_scale_2`). A byte holds two neighbours, the lower half first.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.quantized.layout import NVFP4_GROUP, StoredMatrix, nvfp4_names
from kernels.weight_blocks.block_values import FLOATS_OF_4_BITS

_FLOATS = torch.from_numpy(FLOATS_OF_4_BITS)
_CHUNK_VALUES = 1 << 22  # unpacked at a time: intermediate results are several times as large


def unpacked_nvfp4(matrix: StoredMatrix, read: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
    """Return the values [rows, width], computed in float32. Raises ModelError for scales that are not finite."""
    words_name, whole_name, is_divisor = nvfp4_names(matrix)
    words, whole = read(f"{matrix.module}.{words_name}"), read(f"{matrix.module}.{whole_name}").float().reshape(())
    scales = read(f"{matrix.module}.weight_scale").float()
    whole = whole.reciprocal() if is_divisor else whole
    for name, found in (("weight_scale", scales), (whole_name, whole)):
        if not bool(found.isfinite().all()):
            raise ModelError(f"{matrix.module}.{name} holds numbers that are not finite.")
    values = torch.empty((matrix.rows, matrix.width), dtype=dtype)
    step = max(1, _CHUNK_VALUES // matrix.width)
    for first in range(0, matrix.rows, step):
        part = words[first : first + step]
        numbers = _FLOATS[torch.stack((part & 15, part >> 4), dim=-1).flatten(1).int()]
        groups = numbers.view(len(part), -1, NVFP4_GROUP) * (scales[first : first + step] * whole)[:, :, None]
        values[first : first + step] = groups.flatten(1)
    return values
