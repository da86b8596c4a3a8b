"""Takes quantised matrices apart: the words of their files to numbers, scales and zero points.

Worked example: the GPTQ word 0x98 holds 8 and 9 for the first two inputs of a row; with a stored zero point of 7, that
is 8, and a scale of 0.5 they are 0 and 0.5.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.quantized.layout import Packing, StoredMatrix

Read = Callable[[str], Tensor]  # of a tensor by its full name, as it is stored
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of outputs 0 to 7
_CHUNK_VALUES = 1 << 22  # unpacked at a time: intermediate results are several times as large


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
    """Return the values [rows, width], computed in float32."""
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
    """Return the values [rows, width], computed in float32."""
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
    """Return the numbers of AWQ's words [n, outputs / 8]: uint8 [outputs, n]."""
    columns = words.T.contiguous()
    numbers = torch.empty((len(columns), 8, columns.shape[1]), dtype=torch.uint8)
    for output, place in enumerate(_AWQ_PLACES):
        numbers[:, output] = (columns >> 4 * place) & 15
    return numbers.flatten(0, 1)


_READERS = {Packing.ROWS: _rows_of_words, Packing.INT8: _bytes, Packing.GPTQ: _gptq, Packing.AWQ: _awq}


def _spread(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of `bits` in int32 words [rows, n], lowest first: uint8 [rows, 32 / bits * n]."""
    raw = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return raw if bits == 8 else torch.stack((raw & 15, raw >> 4), dim=-1).flatten(1)


def _by_row(stored: Tensor, matrix: StoredMatrix) -> Tensor:
    """Return scales or zero points [rows, groups]; one of a whole matrix holds for every row."""
    stored = stored[:, None] if stored.ndim == 1 and len(stored) == matrix.rows else stored
    return stored.reshape(-1, matrix.num_groups).expand(matrix.rows, -1)


def _scales(matrix: StoredMatrix, read: Read) -> Tensor:
    scales = _read_scales(matrix, read)
    if matrix.packing in (Packing.AWQ, Packing.GPTQ):
        return scales.T.contiguous()
    return _by_row(scales, matrix).contiguous()


def _read_scales(matrix: StoredMatrix, read: Read) -> Tensor:
    name = f"{matrix.module}.{matrix.scale_name}"
    scales = read(name).float()
    if not bool(scales.isfinite().all()):
        raise ModelError(f"{name} holds numbers that are not finite.")
    return scales


def _groups(matrix: StoredMatrix, read: Read) -> Tensor:
    """Return the group of each input."""
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
