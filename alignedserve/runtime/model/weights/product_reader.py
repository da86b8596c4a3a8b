"""Reads products, and the tensors that they are made of, out of a source."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.runtime.model.weight_names import ParameterNames
from alignedserve.runtime.model.weights.file_products import (
    FileSource,
    NotFiniteError,
    file_parts,
    file_product,
    packs_files,
)
from alignedserve.runtime.model.weights.packed_products import PlainRows, Rows, packed_product
from kernels.cpu.int8_linear import Int8Linear, int8_obstacle
from kernels.linear import AdaptableProjection, Linear


class TensorSource(Protocol):
    """A source of weights."""

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor in its final dtype and on its device. Raises ModelError naming it."""


class PackedSource(TensorSource, Protocol):
    """A source whose matrices may be packed, under names of its own."""

    names: ParameterNames
    dtype: torch.dtype

    def packed(self, name: str, shape: tuple[int, ...]) -> Rows | None:
        """Return the matrix as products are computed with it; None when it is to be unpacked. Raises ModelError
        naming it."""


class LoadingObserver(Protocol):
    """A receiver of how far the loading has come."""

    def tensor_read(self, num_bytes: int) -> None:
        """Count a tensor."""

    def layer_packed(self) -> None:
        """Count a layer."""


class Forms(NamedTuple):
    """A source again, as what else it is."""

    packed: PackedSource | None
    files: FileSource | None


class Nonlinearity(NamedTuple):
    """The nonlinearity after a product."""

    activation: str | None = None
    is_gated: bool = False


NONE = Nonlinearity()


class ProductReader:
    """Reads one tensor, or the product of one or several modules, at a time."""

    def __init__(self, source: TensorSource, forms: Forms, observer: LoadingObserver | None, *, is_int8: bool) -> None:
        """`is_int8`: weights of linear layers are packed with 8 bits, whatever they are in the files."""
        self.source = source
        self.packed, self._files = None if is_int8 else forms.packed, forms.files
        self._is_int8, self._observer = is_int8, observer
        self.dtype, self.device = torch.float32, torch.device("cpu")  # of the weights; known when the first is read

    def linear(
        self,
        modules: Sequence[str],
        rows: Sequence[int],
        in_width: int,
        has_bias: bool,
        then: Nonlinearity = NONE,
    ) -> AdaptableProjection:
        bias = None
        if has_bias:
            bias = torch.cat([self.tensor(f"{name}.bias", n) for name, n in zip(modules, rows, strict=True)])
        from_files = self.file_product(modules, rows, in_width, bias, then)
        if from_files is not None:
            return from_files
        weights = [self.rows(name, count, in_width) for name, count in zip(modules, rows, strict=True)]
        return self.product(modules, weights, bias, then)

    def file_product(
        self, modules: Sequence[str], rows: Sequence[int], in_width: int, bias: Tensor | None, then: Nonlinearity
    ) -> AdaptableProjection | None:
        """Return the product of stacked modules, packed from their files; None where the kernels pack none such."""
        source = self._files
        if source is None or not packs_files(source.dtype, in_width, is_int8=self._is_int8):
            return None
        parts = file_parts(source, [f"{name}.weight" for name in modules], [(count, in_width) for count in rows])
        if parts is None:
            return None
        try:
            product = file_product(parts, bias, source.dtype, *then, is_int8=self._is_int8)
        except OSError as error:
            where = ", ".join(dict.fromkeys(str(part.path) for part in parts))
            raise ModelError(f"{where}: {modules[0]} cannot be read: {error}") from error
        except NotFiniteError as error:
            raise _not_quantizable(modules[0], str(error)) from error
        self.count(sum(rows) * in_width, source.dtype)
        return product

    def turned_rows(self, module: str, count: int, in_width: int) -> Rows:
        packed = self.packed_rows(f"{module}.weight", count, in_width)
        return PlainRows(self.tensor(f"{module}.weight", in_width, count).T) if packed is None else packed

    def rows(self, module: str, count: int, in_width: int) -> Rows:
        """Return the weight of a module, packed as its file has it where products are computed so."""
        packed = self.packed_rows(f"{module}.weight", count, in_width)
        return PlainRows(self.tensor(f"{module}.weight", count, in_width)) if packed is None else packed

    def packed_rows(self, name: str, count: int, in_width: int) -> Rows | None:
        """Return a weight as its file has it packed; None: it is plain, or to be unpacked."""
        if self.packed is None:
            return None
        rows = self.packed.packed(name, (count, in_width))
        if rows is not None:
            self.count(count * in_width, self.packed.dtype)  # as unpacked, by which the whole is known
        return rows

    def product(
        self,
        modules: Sequence[str],
        weights: Sequence[Rows],
        bias: Tensor | None,
        then: Nonlinearity = NONE,
        *,
        has_few_rows: bool = False,
    ) -> AdaptableProjection:
        """Return the product with weights that read the same input. `has_few_rows`: see packed_product."""
        plain = [weight.rows for weight in weights if isinstance(weight, PlainRows)]
        if len(plain) == len(weights):
            return self.projected(modules[0], torch.cat(plain) if len(plain) > 1 else plain[0], bias, then)
        return packed_product(weights, bias, self.dtype, *then, has_few_rows=has_few_rows)

    def projected(
        self, name: str, weight: Tensor, bias: Tensor | None = None, then: Nonlinearity = NONE
    ) -> AdaptableProjection:
        """Return the product with a plain weight, packed with 8 bits if the model's are. `name`: for errors."""
        if not self._is_int8:
            return Linear(weight, bias, activation=then.activation, is_gated=then.is_gated)
        obstacle = int8_obstacle(weight)
        if obstacle is not None:
            raise _not_quantizable(name, obstacle)
        return Int8Linear(weight, bias, activation=then.activation, is_gated=then.is_gated)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the model's dtype, unpacked. Raises ModelError."""
        tensor = self.source.tensor(name, shape)
        self.count(tensor.numel(), tensor.dtype)
        return tensor

    def count(self, num_values: int, dtype: torch.dtype) -> None:
        if self._observer is not None:
            self._observer.tensor_read(num_values * dtype.itemsize)


def _not_quantizable(name: str, obstacle: str) -> ModelError:
    return ModelError(f"{name} cannot be packed with 8 bits: {obstacle}; leave model.quantization unset.")
