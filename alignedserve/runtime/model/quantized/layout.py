"""The layouts of quantised matrices in safetensors files, checked against the config by the files' headers alone.

A matrix [rows, width] of whole numbers is stored, with the scales and zero points of its groups of inputs, as

  compressed-tensors  weight_packed [rows, width / 8] of 4 bits (of 8: width / 4), lowest first, plus 8 (128);
                      weight_scale [rows, groups]; weight_zero_point [rows / 8, groups], packed alike
                      or weight [rows, width] int8, with weight_zero_point like weight_scale
  AWQ                 qweight [width, rows / 8], the outputs of a word in the order 0, 2, 4, 6, 1, 3, 5, 7;
                      scales [groups, rows]; qzeros [groups, rows / 8] like qweight
  GPTQ                qweight [width / 8, rows], lowest first; scales [groups, rows];
                      qzeros [groups, rows / 8], lowest first, smaller by 1; g_idx [width], the group of each input

in words of int32. A value is scale * (number - zero point). FP8 is weight [rows, width] and scales by which it is
multiplied. MXFP4 is one tensor for all experts, `a_blocks` [experts, rows, width / 32, 16], whose bytes hold two floats
of 4 bits each, the lower half first, and `a_scales` [experts, rows, width / 32], powers of two: an expert's is `a.3`.
Compressed-tensors has weight_packed [rows, width / 2] and weight_scale [rows, width / 32] of the same. NVFP4 is that
with scales of FP8 [rows, width / 16], and one number for the whole matrix (`nvfp4_names`). Blocks of GGUF are weight
[rows, bytes of a row], of the type that `block_type` names.

The choice of how products with a quantised matrix are computed, and what memory that takes; without torch."""

import enum
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple, Protocol

from alignedserve.core.block_layout import DTYPE_BYTES
from alignedserve.core.errors import ModelError
from alignedserve.gguf.tensor_types import grouped_row_bytes, packed_row_bytes, row_bytes
from alignedserve.runtime.model.decoder.decoder_parts import (
    NVFP4_GROUP,
    CheckpointQuantization,
    QuantMethod,
    WeightScheme,
)
from alignedserve.runtime.model.weight_index import TensorHeader

_FLOATS = ("F32", "F16", "BF16")
_WORDS = ("I32",)
_FLOAT8 = "F8_E4M3"
_WEIGHT = ".weight"
BLOCK = 32  # inputs with a scale, where matrices are in blocks
_SUPERBLOCK = 256


class MatrixPacking(enum.Enum):
    """Forms in which the values of a matrix are stored."""

    ROWS = "weight_packed"
    INT8 = "weight of 8 bits"
    FLOAT8 = "weight of FP8"
    AWQ = "qweight of AWQ"
    GPTQ = "qweight of GPTQ"
    MXFP4 = "blocks of MXFP4"
    MXFP4_ROWS = "weight_packed of MXFP4"
    NVFP4 = "weight of NVFP4"
    BLOCKS = "weight in blocks"


IN_BLOCKS = (MatrixPacking.MXFP4, MatrixPacking.MXFP4_ROWS, MatrixPacking.BLOCKS)  # as products are computed with them
_FLOATS_OF_4_BITS = (MatrixPacking.MXFP4, MatrixPacking.MXFP4_ROWS, MatrixPacking.NVFP4)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A quantised matrix, as the headers of its tensors say."""

    module: str
    packing: MatrixPacking
    rows: int
    width: int
    scheme: WeightScheme
    scale_name: str
    order_name: str | None  # inputs are assigned to groups one by one, by this tensor
    has_shape: bool = False  # a tensor repeats the shape
    is_modelopt: bool = False  # NVFP4 by the names of NVIDIA's Model Optimizer

    @property
    def group_size(self) -> int:
        """Return the number of inputs that share a scale; the last group may have fewer."""
        size = self.scheme.group_size if self.scheme.block is None else self.scheme.block[1]
        return size or self.width

    @property
    def num_groups(self) -> int:
        return -(-self.width // self.group_size)


class Headers(Protocol):
    """The headers of a checkpoint's tensors."""

    def header(self, name: str) -> TensorHeader | None:
        """Return the form of a tensor; None: there is none of this name."""


def has_weight(headers: Headers, name: str) -> bool:
    module = name.removesuffix(_WEIGHT)
    names = [name] if module == name else [name, module + ".weight_packed", module + ".qweight"]
    return any(headers.header(each) is not None for each in names)


class _Expected(NamedTuple):
    suffix: str
    shapes: tuple[tuple[int, ...], ...]  # any of them
    dtypes: tuple[str, ...]


def stored_matrix(
    headers: Headers, quantization: CheckpointQuantization, module: str, shape: tuple[int, int]
) -> StoredMatrix | None:
    """Return the layout of a module's weight [rows, width]; None: it is not quantised. Raises ModelError naming a
    tensor."""
    packing = _packing(headers, quantization.method, module)
    if packing is None:
        return None
    problems = []
    # Schemes with zero points first: symmetric schemes would fit as well.
    for scheme in sorted(quantization.schemes, key=lambda scheme: scheme.is_symmetric):
        if scheme.is_float != (packing is MatrixPacking.FLOAT8 or packing in _FLOATS_OF_4_BITS):
            continue
        if scheme.is_float and (scheme.num_bits == 4) != (packing in _FLOATS_OF_4_BITS):
            continue
        matrix = _matrix(headers, packing, scheme, module, shape)
        problem = _first_problem(headers, matrix)
        if problem is None:
            return matrix
        problems.append(problem)
    raise ModelError(problems[0] if problems else f"{module} has a {packing.value}, which no group of the config has.")


def _packing(headers: Headers, method: QuantMethod, module: str) -> MatrixPacking | None:
    weight = headers.header(f"{module}.weight")
    if method is QuantMethod.BLOCKS:
        return MatrixPacking.BLOCKS if weight is not None and weight.dtype == "U8" else None
    if method is QuantMethod.MXFP4:
        stack, _ = member_of_stack(module)
        return None if headers.header(f"{stack}_blocks") is None else MatrixPacking.MXFP4
    if method in (QuantMethod.AWQ, QuantMethod.GPTQ):
        is_packed = headers.header(f"{module}.qweight") is not None
        return (MatrixPacking.AWQ if method is QuantMethod.AWQ else MatrixPacking.GPTQ) if is_packed else None
    packed = headers.header(f"{module}.weight_packed")
    if method is QuantMethod.COMPRESSED_TENSORS and packed is not None:
        return MatrixPacking.ROWS if packed.dtype != "U8" else _of_4_bits(headers, module)
    if method is QuantMethod.MODELOPT and weight is not None and weight.dtype == "U8":
        return MatrixPacking.NVFP4
    if weight is None or (weight.dtype in _FLOATS and headers.header(f"{module}.weight_scale") is None):
        return None
    if weight.dtype in _FLOATS:
        raise ModelError(f"{module}.weight is {weight.dtype} and has scales: the checkpoint is not compressed.")
    return MatrixPacking.FLOAT8 if weight.dtype.startswith("F8") else MatrixPacking.INT8


def _of_4_bits(headers: Headers, module: str) -> MatrixPacking:
    scale = headers.header(f"{module}.weight_scale")
    return MatrixPacking.NVFP4 if scale is not None and scale.dtype == _FLOAT8 else MatrixPacking.MXFP4_ROWS


def nvfp4_names(matrix: StoredMatrix) -> tuple[str, str, bool]:
    return ("weight", "weight_scale_2", False) if matrix.is_modelopt else ("weight_packed", "weight_global_scale", True)


def _matrix(
    headers: Headers, packing: MatrixPacking, scheme: WeightScheme, module: str, shape: tuple[int, int]
) -> StoredMatrix:
    order = {MatrixPacking.GPTQ: "g_idx", MatrixPacking.ROWS: "weight_g_idx"}.get(packing)
    names = ("scales",) if packing in (MatrixPacking.AWQ, MatrixPacking.GPTQ) else ("weight_scale", "weight_scale_inv")
    return StoredMatrix(
        module=module,
        packing=packing,
        rows=shape[0],
        width=shape[1],
        scheme=scheme,
        scale_name=next((name for name in names if headers.header(f"{module}.{name}") is not None), names[0]),
        order_name=order if order is not None and headers.header(f"{module}.{order}") is not None else None,
        has_shape=packing is MatrixPacking.ROWS and headers.header(f"{module}.weight_shape") is not None,
        is_modelopt=headers.header(f"{module}.weight_scale_2") is not None,
    )


def _expected(matrix: StoredMatrix) -> list[_Expected]:
    assert matrix.packing is not MatrixPacking.MXFP4, "see _problem_of_stack"
    if matrix.packing is MatrixPacking.FLOAT8:
        return _expected_of_float8(matrix)
    if matrix.packing in (MatrixPacking.AWQ, MatrixPacking.GPTQ):
        return _expected_of_columns(matrix)
    rows, width, bits = matrix.rows, matrix.width, matrix.scheme.num_bits
    if matrix.packing is MatrixPacking.BLOCKS:
        return [_Expected("weight", ((rows, block_bytes(width)),), ("U8",))]
    if matrix.packing is MatrixPacking.MXFP4_ROWS:
        words = _Expected("weight_packed", ((rows, width // 2),), ("U8",))
        return [words, _Expected("weight_scale", ((rows, width // BLOCK),), ("U8",))]
    if matrix.packing is MatrixPacking.NVFP4:
        numbers, whole, _ = nvfp4_names(matrix)
        groups = _Expected("weight_scale", ((rows, width // NVFP4_GROUP),), (_FLOAT8,))
        return [_Expected(numbers, ((rows, width // 2),), ("U8",)), groups, _Expected(whole, ((1,), ()), ("F32",))]
    scales = _scale_shapes(matrix)
    expected = [_Expected("weight_scale", scales, _FLOATS)]
    if matrix.packing is MatrixPacking.INT8:
        zeros = [] if matrix.scheme.is_symmetric else [_Expected("weight_zero_point", scales, ("I8",))]
        return [_Expected("weight", ((rows, width),), ("I8",)), *expected, *zeros]
    expected.insert(0, _Expected("weight_packed", ((rows, _words(width, bits)),), _WORDS))
    if not matrix.scheme.is_symmetric:
        zero_shape = (_words(rows, bits), matrix.num_groups)
        expected.append(_Expected("weight_zero_point", (zero_shape,), _WORDS))
    if matrix.order_name is not None:
        expected.append(_Expected(matrix.order_name, ((width,),), _WORDS))
    if matrix.has_shape:
        expected.append(_Expected("weight_shape", ((2,),), ("I64", "I32")))
    return expected


def _expected_of_columns(matrix: StoredMatrix) -> list[_Expected]:
    rows, width, bits = matrix.rows, matrix.width, matrix.scheme.num_bits
    is_awq = matrix.packing is MatrixPacking.AWQ
    packed_shape = (width, _words(rows, bits)) if is_awq else (_words(width, bits), rows)
    expected = [
        _Expected("qweight", (packed_shape,), _WORDS),
        _Expected("scales", ((matrix.num_groups, rows),), _FLOATS),
        _Expected("qzeros", ((matrix.num_groups, _words(rows, bits)),), _WORDS),
    ]
    if matrix.order_name is not None:
        expected.append(_Expected(matrix.order_name, ((width,),), _WORDS))
    return expected


def _expected_of_float8(matrix: StoredMatrix) -> list[_Expected]:
    block = matrix.scheme.block
    scales = _scale_shapes(matrix) if block is None else ((-(-matrix.rows // block[0]), matrix.num_groups),)
    weight = _Expected("weight", ((matrix.rows, matrix.width),), (_FLOAT8,))
    return [weight, _Expected(matrix.scale_name, scales, _FLOATS)]


def _scale_shapes(matrix: StoredMatrix) -> tuple[tuple[int, ...], ...]:
    shape = (matrix.rows, matrix.num_groups)
    return (shape, (matrix.rows,), (1,), (), (1, 1)) if matrix.scheme.group_size is None else (shape,)


def _first_problem(headers: Headers, matrix: StoredMatrix) -> str | None:
    if matrix.packing in IN_BLOCKS and matrix.width % BLOCK:
        return f"{matrix.module}: {matrix.width} inputs, which blocks of {BLOCK} do not fill."
    if matrix.packing is MatrixPacking.NVFP4 and matrix.width % NVFP4_GROUP:
        return f"{matrix.module}: {matrix.width} inputs, which groups of {NVFP4_GROUP} do not fill."
    if matrix.packing is MatrixPacking.MXFP4:
        return _problem_of_stack(headers, matrix)
    problems = (_problem(headers, matrix.module, expected) for expected in _expected(matrix))
    return next((problem for problem in problems if problem is not None), None)


def _problem_of_stack(headers: Headers, matrix: StoredMatrix) -> str | None:
    stack, number = member_of_stack(matrix.module)
    scales_shape = (matrix.rows, matrix.width // BLOCK)
    for suffix, shape in (("blocks", (*scales_shape, BLOCK // 2)), ("scales", scales_shape)):
        name = f"{stack}_{suffix}"
        header = headers.header(name)
        if header is None:
            return f"tensor {name} is missing."
        if header.dtype != "U8":
            return f"tensor {name} has dtype {header.dtype}, expected U8."
        if header.shape[1:] != shape or number >= header.shape[0]:
            return f"tensor {name} has shape {list(header.shape)}, expected more than {number} of {list(shape)}."
    return None


def block_type(width: int) -> str:
    return "Q4_K" if width % _SUPERBLOCK == 0 else "Q4_1"


def block_bytes(width: int) -> int:
    return row_bytes(block_type(width), width)


def member_of_stack(module: str) -> tuple[str, int]:
    """Return the tensor of all experts that `a.3` is part of, `a`, and its number there; of others the name and 0."""
    stack, _, number = module.rpartition(".")
    return (stack, int(number)) if number.isdecimal() else (module, 0)


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _problem(headers: Headers, module: str, expected: _Expected) -> str | None:
    name = f"{module}.{expected.suffix}"
    header = headers.header(name)
    if header is None:
        return f"tensor {name} is missing."
    if header.dtype not in expected.dtypes:
        return f"tensor {name} has dtype {header.dtype}, expected {' or '.join(expected.dtypes)}."
    if header.shape not in expected.shapes:
        return f"tensor {name} has shape {list(header.shape)}, expected {list(expected.shapes[0])}."
    return None


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
