"""The choice of how products with a quantised matrix are computed, and what memory that takes; without torch."""

import enum
from dataclasses import dataclass
from importlib.util import find_spec

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.gguf.tensor_types import grouped_row_bytes, packed_row_bytes
from alignedserve.runtime.model.quantized.layout import IN_BLOCKS, MatrixPacking, StoredMatrix, block_type

_HAS_KERNELS = find_spec("kernels._native") is not None
_BLOCK = 32  # inputs of one block of the kernels
_NARROW = 128  # float16 scales for every 32 inputs take less than float32 ones for fewer than this, with minima
_SCALE_BYTES, _ZERO_BYTES = 4, 1  # of a group
_GPU_STEP = 16  # rows and columns of FP8 products on a GPU are multiples of this


class ProductForm(enum.Enum):
    """Ways to compute products with a matrix."""

    BLOCKS_4 = "in blocks of 4 bits"
    BLOCKS_8 = "in blocks of 8 bits"
    INT8 = "in 8 bits"
    FLOAT8 = "in FP8"
    GROUPS_4 = "in groups of 4 bits"
    GROUPS_8 = "in groups of 8 bits"
    GROUPS_FLOAT8 = "in groups of FP8"
    GROUPS_NVFP4 = "in groups of NVFP4"
    GROUPS_OF_BLOCKS = "in groups, as blocks have them"
    UNPACKED = "unpacked"


GROUPS_OF_GPUS = (
    ProductForm.GROUPS_4,
    ProductForm.GROUPS_8,
    ProductForm.GROUPS_FLOAT8,
    ProductForm.GROUPS_NVFP4,
    ProductForm.GROUPS_OF_BLOCKS,
)


@dataclass(frozen=True, slots=True)
class Computing:
    """Device and dtype of a worker's computations."""

    device: str
    dtype: str
    has_float8: bool = False  # the GPU multiplies FP8
    has_kernels: bool = _HAS_KERNELS

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def _has_blocks(self) -> bool:
        return self.dtype in ("float32", "bfloat16") and self.has_kernels

    def form_of(self, matrix: StoredMatrix) -> ProductForm:
        """Return how products with this matrix are computed, unless its values turn out to forbid it."""
        if self.is_gpu:
            scheme = matrix.scheme
            is_even = matrix.rows % _GPU_STEP == 0 and matrix.width % _GPU_STEP == 0
            is_by_row = scheme.is_float and scheme.block is None and scheme.group_size is None
            if is_by_row and is_even and scheme.has_8_bit_inputs and self.has_float8:
                return ProductForm.FLOAT8
            return _grouped_form(matrix)
        is_unpacked = matrix.scheme.is_float and matrix.packing not in IN_BLOCKS
        return ProductForm.UNPACKED if is_unpacked else self._form_on_cpu(matrix)

    def form_of_expert(self, matrix: StoredMatrix) -> ProductForm:
        """Return the same for a matrix of an expert; those of all experts are multiplied together on GPUs."""
        return _grouped_form(matrix) if self.is_gpu else self.form_of(matrix)

    def _form_on_cpu(self, matrix: StoredMatrix) -> ProductForm:
        scheme = matrix.scheme
        fills_blocks = _fills_blocks(matrix)
        if not self._has_blocks:
            return ProductForm.UNPACKED
        if scheme.num_bits == 4:
            return ProductForm.BLOCKS_4 if fills_blocks else ProductForm.UNPACKED
        if not scheme.is_symmetric:
            return ProductForm.UNPACKED
        is_by_row = matrix.num_groups == 1 and matrix.packing is not MatrixPacking.GPTQ
        if is_by_row and scheme.has_8_bit_inputs:
            return ProductForm.INT8
        if fills_blocks:
            return ProductForm.BLOCKS_8
        return ProductForm.INT8 if is_by_row else ProductForm.UNPACKED


def _fills_blocks(matrix: StoredMatrix) -> bool:
    return matrix.width % _BLOCK == 0 and (matrix.num_groups == 1 or matrix.group_size % _BLOCK == 0)


def _grouped_form(matrix: StoredMatrix) -> ProductForm:
    if matrix.packing in IN_BLOCKS:
        return ProductForm.GROUPS_OF_BLOCKS
    if matrix.packing is MatrixPacking.NVFP4:
        return ProductForm.UNPACKED if matrix.width % _BLOCK else ProductForm.GROUPS_NVFP4
    if not _fills_blocks(matrix):
        return ProductForm.UNPACKED
    if matrix.scheme.is_float:
        return ProductForm.GROUPS_FLOAT8
    return ProductForm.GROUPS_4 if matrix.scheme.num_bits == 4 else ProductForm.GROUPS_8


def form_bytes(matrix: StoredMatrix, form: ProductForm, dtype: str) -> int:
    count = matrix.rows * matrix.width
    if form is ProductForm.UNPACKED:
        return count * DTYPE_BYTES[dtype]
    if form is ProductForm.BLOCKS_8:
        return count * 34 // 32
    if form is ProductForm.BLOCKS_4:
        if matrix.packing in IN_BLOCKS:
            return matrix.rows * (packed_row_bytes(_type_of_blocks(matrix), matrix.width) or 0)
        together = inputs_together(matrix)
        # Scales of a symmetric matrix are nearly always float16 numbers; others have float32 minima beside them.
        if matrix.scheme.is_symmetric and together < _NARROW:
            return count * 18 // 32
        return count // 2 + count // together * 8
    if form in (ProductForm.GROUPS_4, ProductForm.GROUPS_8):
        words = count * matrix.scheme.num_bits // 8
        return words + count // inputs_together(matrix) * (_SCALE_BYTES + _ZERO_BYTES)
    if form is ProductForm.GROUPS_OF_BLOCKS:
        return matrix.rows * (grouped_row_bytes(_type_of_blocks(matrix), matrix.width) or 0)
    if form is ProductForm.GROUPS_NVFP4:
        return count * 9 // 16 + matrix.rows * _SCALE_BYTES
    if form is ProductForm.GROUPS_FLOAT8:
        return count + count // inputs_together(matrix) * _SCALE_BYTES
    return count + matrix.rows * 4


def _type_of_blocks(matrix: StoredMatrix) -> str:
    return block_type(matrix.width) if matrix.packing is MatrixPacking.BLOCKS else "MXFP4"


def inputs_together(matrix: StoredMatrix) -> int:
    return next(size for size in (128, 64, _BLOCK) if matrix.width % size == 0 == matrix.group_size % size)
