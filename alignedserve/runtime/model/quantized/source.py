"""The tensors of a folder with quantised matrices as a source of weights: packed for kernels, or unpacked."""

import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.packed_products import BlockRows, Float8Rows, GroupedRows, Int8Rows, Rows
from alignedserve.runtime.model.quantized.layout import Packing, StoredMatrix, has_weight, stored_matrix
from alignedserve.runtime.model.quantized.product_form import Computing, ProductForm, inputs_together
from alignedserve.runtime.model.quantized.scheme import CheckpointQuantization
from alignedserve.runtime.model.quantized.unpacking import (
    Float8Matrix,
    IntegerMatrix,
    read_float8,
    read_integers,
    unpacked_float8,
    unpacked_integers,
)
from alignedserve.runtime.model.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weight_names import ParameterNames
from kernels.cpu.int8_linear import has_int8_products
from kernels.cpu.packed_linear import FileRows
from kernels.narrow.float8_linear import has_float8_products
from kernels.narrow.grouped_linear import GroupedWeight, Numbers

_BLOCK = 32
_WEIGHT = ".weight"


class QuantizedSource:
    """The tensors of one folder, in the dtype and on the device of `plain`."""

    def __init__(
        self,
        plain: SafetensorsSource,
        quantization: CheckpointQuantization,
        names: ParameterNames,
        *,
        unpacks_all: bool = False,
    ) -> None:
        """`unpacks_all`: no product is computed from packed weights, for comparison."""
        self.names = names
        self.dtype = plain.dtype
        self._plain = plain
        self._quantization = quantization
        self._unpacks_all = unpacks_all
        has_float8 = has_float8_products(plain.device)
        self._computing = Computing(plain.device.type, str(plain.dtype).removeprefix("torch."), has_float8)

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name, or one that is unpacked to it."""
        return has_weight(self._plain.index, name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor, unpacked, converted and moved. Raises ModelError naming it."""
        matrix = self._matrix(name, shape)
        if matrix is None:
            return self._plain.tensor(name, shape)
        if matrix.packing is Packing.FLOAT8:
            values = unpacked_float8(matrix, read_float8(matrix, self._plain.stored), self.dtype)
        else:
            integers = read_integers(matrix, self._plain.stored, self._quantization.zero_offset)
            values = unpacked_integers(integers, self.dtype)
        return values.to(self._plain.device)

    def packed(self, name: str, shape: tuple[int, ...]) -> Rows | None:
        """Return the matrix as products are computed with it; None when it is to be unpacked. Raises ModelError."""
        matrix = None if self._unpacks_all else self._matrix(name, shape)
        form = ProductForm.UNPACKED if matrix is None else self._computing.form_of(matrix)
        if matrix is None or form is ProductForm.UNPACKED or (form is ProductForm.INT8 and not has_int8_products()):
            return None
        packed: Rows | None
        if matrix.packing is Packing.FLOAT8:
            packed = packed_float8(matrix, read_float8(matrix, self._plain.stored), form)
        else:
            integers = read_integers(matrix, self._plain.stored, self._quantization.zero_offset)
            packed = packed_integers(matrix, integers, form)
        return packed.moved(self._plain.device) if isinstance(packed, Float8Rows | GroupedRows) else packed

    def file_rows(self, name: str, shape: tuple[int, int]) -> FileRows | None:
        """Return where a matrix that is not quantised lies; None for others. Raises ModelError naming it."""
        return self._plain.file_rows(name, shape) if self._matrix(name, shape) is None else None

    def _matrix(self, name: str, shape: tuple[int, ...]) -> StoredMatrix | None:
        if len(shape) != 2 or not name.endswith(_WEIGHT):
            return None
        module = name.removesuffix(_WEIGHT)
        try:
            return stored_matrix(self._plain.index, self._quantization, module, (shape[0], shape[1]))
        except ModelError as error:
            raise ModelError(f"{self._plain.index.folder}: {error}") from error


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
