"""Reads matrices whose files have them in blocks, or in what blocks hold as it is."""

import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.quantized.layout import Packing, StoredMatrix, block_type, member_of_stack
from alignedserve.runtime.model.weights.packed_products import BlockRows
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from kernels.weight_blocks.block_formats import has_finite_scales

_MXFP4 = "MXFP4"


def read_blocks(matrix: StoredMatrix, source: SafetensorsSource) -> BlockRows:
    """Read a matrix; of an expert's nothing of the others in its tensor is read. Raises ModelError."""
    if matrix.packing is Packing.BLOCKS:
        type_name, name = block_type(matrix.width), f"{matrix.module}.weight"
        rows = source.stored(name)
    else:
        type_name, (name, blocks, scales) = _MXFP4, _mxfp4(matrix, source)
        rows = block_rows(blocks, scales)
    if not has_finite_scales(rows, type_name):
        raise ModelError(f"{name} holds numbers that are not finite.")
    return BlockRows(rows, type_name, matrix.width)


def _mxfp4(matrix: StoredMatrix, source: SafetensorsSource) -> tuple[str, Tensor, Tensor]:
    if matrix.packing is Packing.MXFP4:
        stack, number = member_of_stack(matrix.module)
        name = f"{stack}_scales"
        return name, source.stored_member(f"{stack}_blocks", number), source.stored_member(name, number)
    name = f"{matrix.module}.weight_scale"
    return name, source.stored(f"{matrix.module}.weight_packed").view(matrix.rows, -1, 16), source.stored(name)


def block_rows(blocks: Tensor, scales: Tensor) -> Tensor:
    """Put blocks [rows, n, 16], of neighbours in each byte, and scales [rows, n] into rows [rows, n * 17]: of each the
    scale, then 16 bytes whose lower halves are the first 16 floats."""
    return torch.cat((scales[..., None], apart(blocks)), dim=-1).flatten(1)


def apart(blocks: Tensor) -> Tensor:
    """Return blocks [rows, n, 16] of 32 floats, neighbours in each byte, with the first 16 in lower halves."""
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [rows, n, 32]
    return halves[..., :16] | halves[..., 16:] << 4
