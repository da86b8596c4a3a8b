"""Puts quantised matrices into the forms that kernels multiply, without changing a value.

A group of 4 bits becomes blocks of `kernels.block_formats`: G4_128 where 128 inputs share a scale; otherwise Q4_0 where
zero points are 8 and scales are float16 numbers; otherwise G4_64 or G4_32. The float32 minimum, -scale * zero point, is
exact for scales of 16 bits. 8 bits become Q8_0 where scales are float16 numbers; otherwise, with one scale for each
row, they stay as they are. On GPUs groups of 4 and 8 bits keep float32 scales and their zero points, and FP8 float32
scales (`kernels.narrow.grouped_linear`).
"""

import torch
from torch import Tensor

from alignedserve.runtime.model.packed_products import BlockRows, Float8Rows, GroupedRows, Int8Rows
from alignedserve.runtime.model.quantized.layout import StoredMatrix
from alignedserve.runtime.model.quantized.product_form import ProductForm, inputs_together
from alignedserve.runtime.model.quantized.unpacking import Float8Matrix, IntegerMatrix
from kernels.narrow.grouped_linear import GroupedWeight, Numbers

_BLOCK = 32


def packed_integers(
    matrix: StoredMatrix, integers: IntegerMatrix, form: ProductForm
) -> BlockRows | GroupedRows | Int8Rows | None:
    """Return the matrix in this form; None where its values do not allow it."""
    if form is ProductForm.INT8:
        return _int8_rows(integers)
    runs = torch.arange(matrix.width) // matrix.group_size
    order = None if torch.equal(integers.group_of, runs) else integers.group_of.argsort(stable=True)
    if order is not None:
        if not torch.equal(integers.group_of[order], runs):
            return None
        integers = integers._replace(numbers=integers.numbers[:, order], group_of=runs)
    if form in (ProductForm.GROUPS_4, ProductForm.GROUPS_8):
        return GroupedRows(_integer_groups(matrix, integers), order)
    rows = _blocks_of_4(matrix, integers) if form is ProductForm.BLOCKS_4 else _blocks_of_8(matrix, integers)
    if rows is None:
        return _int8_rows(integers) if matrix.num_groups == 1 else None
    return rows._replace(order=order)


def packed_float8(matrix: StoredMatrix, stored: Float8Matrix, form: ProductForm) -> Float8Rows | GroupedRows:
    """Return a matrix of FP8 in this form; of FLOAT8 its scales are those of rows."""
    if form is ProductForm.FLOAT8:
        return Float8Rows(stored.values, stored.scales)
    scales = stored.scales if stored.scales.ndim == 2 else stored.scales[:, None]
    if matrix.scheme.block is not None:
        scales = scales.repeat_interleave(matrix.scheme.block[0], 0)[: matrix.rows]
    scales = _per_block(scales, matrix, inputs_together(matrix)).contiguous()
    return GroupedRows(GroupedWeight(Numbers.FLOAT8, stored.values.view(torch.uint8), scales, None))


def _int8_rows(integers: IntegerMatrix) -> Int8Rows | None:
    if bool((integers.zeros != 128).any()):
        return None
    return Int8Rows((integers.numbers ^ 0x80).view(torch.int8), integers.scales[:, 0])


def _blocks_of_4(matrix: StoredMatrix, integers: IntegerMatrix) -> BlockRows:
    blocks = integers.numbers.view(matrix.rows, -1, _BLOCK)
    quants = blocks[:, :, :16] | blocks[:, :, 16:] << 4
    together = inputs_together(matrix)
    if together < 128 and bool((integers.zeros == 8).all()) and _are_halves(integers.scales):
        heads = _per_block(integers.scales.half(), matrix)[:, :, None]
        return _rows_of(heads, quants, "Q4_0", matrix)
    minima = -(integers.scales * integers.zeros.float())
    heads = _per_block(torch.stack((integers.scales, minima), dim=2), matrix, together)
    quants = quants.view(matrix.rows, matrix.width // together, together // 2)
    return _rows_of(heads, quants, f"G4_{together}", matrix)


def _integer_groups(matrix: StoredMatrix, integers: IntegerMatrix) -> GroupedWeight:
    together = inputs_together(matrix)
    scales, zeros = (_per_block(each, matrix, together).contiguous() for each in (integers.scales, integers.zeros))
    if matrix.scheme.num_bits == 8:
        return GroupedWeight(Numbers.INT8, integers.numbers, scales, zeros.to(torch.uint8))
    groups = integers.numbers.view(matrix.rows, -1, together)
    words = groups[:, :, : together // 2] | groups[:, :, together // 2 :] << 4
    return GroupedWeight(Numbers.INT4, words.flatten(1), scales, zeros.to(torch.uint8))


def _blocks_of_8(matrix: StoredMatrix, integers: IntegerMatrix) -> BlockRows | None:
    if not bool((integers.zeros == 128).all()) or not _are_halves(integers.scales):
        return None
    quants = (integers.numbers ^ 0x80).view(matrix.rows, -1, _BLOCK)
    return _rows_of(_per_block(integers.scales.half(), matrix)[:, :, None], quants, "Q8_0", matrix)


def _are_halves(scales: Tensor) -> bool:
    return torch.equal(scales.half().float(), scales)


def _per_block(heads: Tensor, matrix: StoredMatrix, size: int = _BLOCK) -> Tensor:
    """Return [rows, groups, ...] for every block of `size` inputs."""
    return heads.repeat_interleave(matrix.group_size // size, 1)[:, : matrix.width // size]


def _rows_of(heads: Tensor, quants: Tensor, type_name: str, matrix: StoredMatrix) -> BlockRows:
    """Put the scales [rows, blocks, n] before the quants [rows, blocks, bytes] of their blocks."""
    blocks = torch.cat((heads.contiguous().view(torch.uint8), quants), dim=2)
    return BlockRows(blocks.flatten(1), type_name, matrix.width)
