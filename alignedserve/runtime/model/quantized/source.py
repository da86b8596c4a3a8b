"""The tensors of a folder with quantised matrices as a source of weights: packed for kernels, or unpacked."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.decoder.decoder_parts import NVFP4_GROUP, CheckpointQuantization, QuantMethod
from alignedserve.runtime.model.quantized.layout import (
    IN_BLOCKS,
    Computing,
    MatrixPacking,
    ProductForm,
    StoredMatrix,
    block_type,
    has_weight,
    inputs_together,
    member_of_stack,
    nvfp4_names,
    stored_matrix,
)
from alignedserve.runtime.model.weights.packed_products import BlockRows, Float8Rows, GroupedRows, Int8Rows, Rows
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weights.weight_source import WeightSource
from kernels.block_formats import dequantize, grouped_blocks, has_finite_scales
from kernels.block_values import FLOATS_OF_4_BITS
from kernels.cpu.packed_linear import FileRows, has_int8_products
from kernels.float8_linear import has_float8_products
from kernels.grouped_linear import GroupedWeight, Numbers

_MXFP4 = "MXFP4"


def read_blocks(matrix: StoredMatrix, source: SafetensorsSource) -> BlockRows:
    """Read a matrix; of an expert's nothing of the others in its tensor is read. Raises ModelError."""
    if matrix.packing is MatrixPacking.BLOCKS:
        type_name, name = block_type(matrix.width), f"{matrix.module}.weight"
        rows = source.stored(name)
    else:
        type_name, (name, blocks, scales) = _MXFP4, _mxfp4(matrix, source)
        rows = block_rows(blocks, scales)
    if not has_finite_scales(rows, type_name):
        raise ModelError(f"{name} holds numbers that are not finite.")
    return BlockRows(rows, type_name, matrix.width)


def _mxfp4(matrix: StoredMatrix, source: SafetensorsSource) -> tuple[str, Tensor, Tensor]:
    if matrix.packing is MatrixPacking.MXFP4:
        stack, number = member_of_stack(matrix.module)
        name = f"{stack}_scales"
        return name, source.stored_member(f"{stack}_blocks", number), source.stored_member(name, number)
    name = f"{matrix.module}.weight_scale"
    return name, source.stored(f"{matrix.module}.weight_packed").view(matrix.rows, -1, 16), source.stored(name)


def block_rows(blocks: Tensor, scales: Tensor) -> Tensor:
    """Join blocks [rows, n, 16] of neighbours, and scales [rows, n], to rows [rows, n * 17]: each scale, then its
    bytes."""
    return torch.cat((scales[..., None], apart(blocks)), dim=-1).flatten(1)


def apart(blocks: Tensor) -> Tensor:
    """Return blocks [rows, n, 16] of 32 floats, neighbours in each byte, with the first 16 in lower halves."""
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [rows, n, 32]
    return halves[..., :16] | halves[..., 16:] << 4


_PIECE_VALUES = 1 << 22
_FLOATS = torch.from_numpy(FLOATS_OF_4_BITS)


class _Parts(NamedTuple):
    words: Tensor  # uint8 [rows, width / 2]
    scales: Tensor  # FP8 [rows, width / 16]
    whole: Tensor  # float32, by which scales are multiplied


def unpacked_nvfp4(matrix: StoredMatrix, read: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
    """Return the values [rows, width], computed in float32. Raises ModelError for scales that are not finite."""
    words, scales, whole = _read(matrix, read)
    values = torch.empty((matrix.rows, matrix.width), dtype=dtype)
    step = max(1, _PIECE_VALUES // matrix.width)
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
    for name, tensor in (("weight_scale", scales.float()), (whole_name, whole)):
        if not bool(tensor.isfinite().all()):
            raise ModelError(f"{matrix.module}.{name} holds numbers that are not finite.")
    return _Parts(words, scales, whole)


Read = Callable[[str], Tensor]  # of a tensor by its full name, as it is stored
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of outputs 0 to 7
_CHUNK_VALUES = 1 << 22  # unpacked at a time: intermediate results are several times as large
_BLOCK = 32
_WEIGHT = ".weight"


class IntegerMatrix(NamedTuple):
    """A matrix of whole numbers; a value is scale * (number - zero point), both of the output and the input's group."""

    numbers: Tensor  # uint8 [rows, width]
    scales: Tensor  # float32 [rows, groups]
    zeros: Tensor  # int16 [rows, groups]
    group_of: Tensor  # int64 [width]


class Float8Matrix(NamedTuple):
    """A matrix of FP8, and by what its values are multiplied."""

    values: Tensor  # float8_e4m3fn [rows, width]
    scales: Tensor  # float32: [rows] or [row blocks, column blocks]


def read_integers(matrix: StoredMatrix, read: Read, zero_offset: int) -> IntegerMatrix:
    """Read a matrix of whole numbers. Raises ModelError for numbers, groups or scales out of range."""
    numbers, zeros = _READERS[matrix.packing](matrix, read, zero_offset)
    scales = _scales(matrix, read)
    return IntegerMatrix(numbers, scales, zeros, _groups(matrix, read))


def read_float8(matrix: StoredMatrix, read: Read) -> Float8Matrix:
    """Read a matrix of FP8. Raises ModelError for scales or values that are not finite."""
    values = read(f"{matrix.module}.weight")
    if bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise ModelError(f"{matrix.module}.weight holds numbers that are not finite.")
    scales = _scales(matrix, read) if matrix.scheme.block is None else _read_scales(matrix, read)
    return Float8Matrix(values, scales.squeeze(1) if matrix.num_groups == 1 and matrix.scheme.block is None else scales)


def unpacked_integers(matrix: IntegerMatrix, dtype: torch.dtype) -> Tensor:
    values = torch.empty(matrix.numbers.shape, dtype=dtype)
    width, groups = values.shape[1], matrix.scales.shape[1]
    size = -(-width // groups)
    are_runs = width % groups == 0 and torch.equal(matrix.group_of, torch.arange(width) // size)
    numbers, into = matrix.numbers[:, :, None], values[:, :, None]
    scales, zeros = matrix.scales, matrix.zeros
    if are_runs:  # read once for a group, not for each of its inputs
        numbers, into = (each.view(len(values), groups, size) for each in (matrix.numbers, values))
    step = max(1, _CHUNK_VALUES // width)
    for first in range(0, len(values), step):
        part = slice(first, first + step)
        part_zeros, part_scales = zeros[part].float(), scales[part]
        if not are_runs:
            part_zeros, part_scales = (each[:, matrix.group_of] for each in (part_zeros, part_scales))
        into[part] = (numbers[part].float() - part_zeros[:, :, None]).mul_(part_scales[:, :, None])
    return values


def unpacked_float8(matrix: StoredMatrix, stored: Float8Matrix, dtype: torch.dtype) -> Tensor:
    values = torch.empty(stored.values.shape, dtype=dtype)
    size, height = matrix.group_size, 1 if matrix.scheme.block is None else matrix.scheme.block[0]
    scales = stored.scales if stored.scales.ndim == 2 else stored.scales[:, None]
    step = max(1, _CHUNK_VALUES // values.shape[1])
    for first in range(0, len(values), step):
        rows = torch.arange(first, min(first + step, len(values)))
        wide = scales[rows // height].repeat_interleave(size, 1)[:, : values.shape[1]]
        values[first : first + step] = stored.values[first : first + step].float() * wide
    return values


def _rows_of_words(matrix: StoredMatrix, read: Read, zero_offset: int) -> tuple[Tensor, Tensor]:
    bits, middle = matrix.scheme.num_bits, 1 << matrix.scheme.num_bits - 1
    shape = read(f"{matrix.module}.weight_shape") if matrix.has_shape else None
    if shape is not None and shape.tolist() != [matrix.rows, matrix.width]:
        raise ModelError(f"{matrix.module}.weight_shape is {shape.tolist()}, expected {[matrix.rows, matrix.width]}.")
    numbers = _spread(read(f"{matrix.module}.weight_packed"), bits)[:, : matrix.width].contiguous()
    if matrix.scheme.is_symmetric:
        return numbers, torch.full((matrix.rows, matrix.num_groups), middle, dtype=torch.int16)
    zeros = _spread(read(f"{matrix.module}.weight_zero_point").T, bits)[:, : matrix.rows]
    return numbers, zeros.T.to(torch.int16)


def _bytes(matrix: StoredMatrix, read: Read, zero_offset: int) -> tuple[Tensor, Tensor]:
    middle = 1 << matrix.scheme.num_bits - 1
    numbers = read(f"{matrix.module}.weight")
    if middle < 128 and bool((numbers < -middle).any() | (numbers >= middle).any()):
        raise ModelError(f"{matrix.module}.weight holds numbers of more than {matrix.scheme.num_bits} bits.")
    numbers = numbers.view(torch.uint8) + middle  # wraps around
    zeros = torch.full((matrix.rows, matrix.num_groups), middle, dtype=torch.int16)
    if not matrix.scheme.is_symmetric:
        stored = read(f"{matrix.module}.weight_zero_point")
        zeros = zeros + _by_row(stored, matrix).to(torch.int16)
    return numbers, zeros


def _gptq(matrix: StoredMatrix, read: Read, zero_offset: int) -> tuple[Tensor, Tensor]:
    # Example: the word 0x98 holds 8 and 9 for the first two inputs of a row; with a stored zero point of 7, that is 8,
    # and a scale of 0.5 they are 0 and 0.5.
    bits = matrix.scheme.num_bits
    numbers = _spread(read(f"{matrix.module}.qweight").T, bits)[:, : matrix.width].contiguous()
    # Added to whole words, as the tools do that subtract it: a zero point of 0 borrows from its neighbour.
    ones = zero_offset * (0x11111111 if bits == 4 else 0x01010101)
    zeros = _spread(read(f"{matrix.module}.qzeros") + ones, bits)[:, : matrix.rows]
    return numbers, zeros.T.to(torch.int16)


def _awq(matrix: StoredMatrix, read: Read, zero_offset: int) -> tuple[Tensor, Tensor]:
    numbers, zeros = (_outputs_in_order(read(f"{matrix.module}.{name}")) for name in ("qweight", "qzeros"))
    return numbers[: matrix.rows], zeros[: matrix.rows].to(torch.int16)


def _outputs_in_order(words: Tensor) -> Tensor:
    columns = words.T.contiguous()
    numbers = torch.empty((len(columns), 8, columns.shape[1]), dtype=torch.uint8)
    for output, nibble in enumerate(_AWQ_PLACES):
        numbers[:, output] = (columns >> 4 * nibble) & 15
    return numbers.flatten(0, 1)


_READERS = {
    MatrixPacking.ROWS: _rows_of_words,
    MatrixPacking.INT8: _bytes,
    MatrixPacking.GPTQ: _gptq,
    MatrixPacking.AWQ: _awq,
}


def _spread(words: Tensor, bits: int) -> Tensor:
    raw = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return raw if bits == 8 else torch.stack((raw & 15, raw >> 4), dim=-1).flatten(1)


def _by_row(stored: Tensor, matrix: StoredMatrix) -> Tensor:
    stored = stored[:, None] if stored.ndim == 1 and len(stored) == matrix.rows else stored
    return stored.reshape(-1, matrix.num_groups).expand(matrix.rows, -1)


def _scales(matrix: StoredMatrix, read: Read) -> Tensor:
    scales = _read_scales(matrix, read)
    if matrix.packing in (MatrixPacking.AWQ, MatrixPacking.GPTQ):
        return scales.T.contiguous()
    return _by_row(scales, matrix).contiguous()


def _read_scales(matrix: StoredMatrix, read: Read) -> Tensor:
    name = f"{matrix.module}.{matrix.scale_name}"
    scales = read(name).float()
    if not bool(scales.isfinite().all()):
        raise ModelError(f"{name} holds numbers that are not finite.")
    return scales


def _groups(matrix: StoredMatrix, read: Read) -> Tensor:
    in_runs = torch.arange(matrix.width) // matrix.group_size
    if matrix.order_name is None:
        return in_runs
    name = f"{matrix.module}.{matrix.order_name}"
    groups = read(name).long()
    if bool((groups == -1).all()):  # written by tools that had nothing to assign
        return in_runs
    if bool((groups < 0).any() | (groups >= matrix.num_groups).any()):
        raise ModelError(f"{name} holds groups that are not in 0 to {matrix.num_groups - 1}.")
    return groups


class QuantizedSource(WeightSource):
    """The tensors of one folder, in the dtype and on the device of `plain`."""

    def __init__(
        self, plain: SafetensorsSource, quantization: CheckpointQuantization, *, unpacks_all: bool = False
    ) -> None:
        """`unpacks_all`: no product is computed with packed weights, for comparison."""
        super().__init__(plain.dtype, plain.device)
        self._plain, self._quantization, self._unpacks_all = plain, quantization, unpacks_all
        has_float8 = has_float8_products(plain.device)
        self._computing = Computing(plain.device.type, str(plain.dtype).removeprefix("torch."), has_float8)

    @override
    def has(self, name: str) -> bool:
        return has_weight(self._plain.index, name)

    @override
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if self._quantization.method is QuantMethod.MXFP4:  # of floats, such matrices lie [inputs, outputs]
            turned = self._matrix(name, shape[::-1])
            if turned is None:
                return self._plain.tensor(name, shape)
            return self._unpacked_blocks(turned).T.to(self.device)
        matrix = self._matrix(name, shape)
        if matrix is None:
            return self._plain.tensor(name, shape)
        if matrix.packing in IN_BLOCKS:
            values = self._unpacked_blocks(matrix)
        elif matrix.packing is MatrixPacking.NVFP4:
            values = unpacked_nvfp4(matrix, self._plain.stored, self.dtype)
        elif matrix.packing is MatrixPacking.FLOAT8:
            values = unpacked_float8(matrix, read_float8(matrix, self._plain.stored), self.dtype)
        else:
            integers = read_integers(matrix, self._plain.stored, self._quantization.zero_offset)
            values = unpacked_integers(integers, self.dtype)
        return values.to(self.device)

    def _unpacked_blocks(self, matrix: StoredMatrix) -> Tensor:
        blocks = read_blocks(matrix, self._plain)
        return dequantize(blocks.rows, blocks.type_name).to(self.dtype)

    @override
    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._plain.exact(name, shape)

    @override
    def packed(self, name: str, shape: tuple[int, ...]) -> Rows | None:
        matrix = None if self._unpacks_all else self._matrix(name, shape)
        form = ProductForm.UNPACKED if matrix is None else self._computing.form_of(matrix)
        if matrix is None or form is ProductForm.UNPACKED or (form is ProductForm.INT8 and not has_int8_products()):
            return None
        packed: Rows | None
        if form is ProductForm.GROUPS_NVFP4:
            packed = read_nvfp4_groups(matrix, self._plain.stored)
        elif matrix.packing in IN_BLOCKS:
            packed = blocks = read_blocks(matrix, self._plain)
            if form is ProductForm.GROUPS_OF_BLOCKS:
                packed = GroupedRows(grouped_blocks(blocks.rows, blocks.type_name))
        elif matrix.packing is MatrixPacking.FLOAT8:
            packed = packed_float8(matrix, read_float8(matrix, self._plain.stored), form)
        else:
            integers = read_integers(matrix, self._plain.stored, self._quantization.zero_offset)
            packed = packed_integers(matrix, integers, form)
        return packed.moved(self.device) if isinstance(packed, Float8Rows | GroupedRows) else packed

    @override
    def file_rows(self, name: str, shape: tuple[int, int]) -> FileRows | None:
        is_plain = not self._unpacks_all and self._matrix(name, shape) is None
        return self._plain.file_rows(name, shape) if is_plain else None

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
    """Return the matrix in this form; None where its values do not allow it. A group of 4 bits becomes blocks of
    `block_formats`: G4_128 where 128 inputs share a scale; otherwise Q4_0 where zero points are 8 and scales are
    float16 numbers; otherwise G4_64 or G4_32. The float32 minimum, -scale * zero point, is exact for scales of 16 bits.
    8 bits become Q8_0 where scales are float16 numbers; otherwise, with one scale for each row, they stay as they are.
    On GPUs groups of 4 and 8 bits keep float32 scales and their zero points."""
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
    return heads.repeat_interleave(matrix.group_size // size, 1)[:, : matrix.width // size]


def _rows_of(heads: Tensor, quants: Tensor, type_name: str, matrix: StoredMatrix) -> BlockRows:
    blocks = torch.cat((heads.contiguous().view(torch.uint8), quants), dim=2)
    return BlockRows(blocks.flatten(1), type_name, matrix.width)
