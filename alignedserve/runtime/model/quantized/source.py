"""The tensors of a folder with quantised matrices as a source of weights: packed for kernels, or unpacked."""

from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.packed_products import Float8Rows, GroupedRows, Rows
from alignedserve.runtime.model.quantized.layout import Packing, StoredMatrix, has_weight, stored_matrix
from alignedserve.runtime.model.quantized.packing import packed_float8, packed_integers
from alignedserve.runtime.model.quantized.product_form import Computing, ProductForm
from alignedserve.runtime.model.quantized.scheme import CheckpointQuantization
from alignedserve.runtime.model.quantized.unpacking import (
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
