"""A source of weights gives one tensor at a time: unpacked, packed as in its file, or in part."""

import math
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.runtime.model.sharding.regions import Region, tensor_region
from alignedserve.runtime.model.weight_names import ParameterNames
from alignedserve.runtime.model.weights.packed_products import Rows
from kernels.block_values import unpack_rows
from kernels.cpu.packed_linear import FileRows


class RowLookup(Protocol):
    """A matrix [rows, width] whose rows are looked up; a tensor is one."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the rows that are looked up."""

    @property
    def device(self) -> torch.device:
        """Return where they are."""

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        """Return the rows of these numbers, int64 [n] -> [n, width], in memory of their own; `dim` is 0."""


class BlockLookup:
    """Rows that stay in the blocks of their file: a fifth of the memory that they take in float32."""

    def __init__(self, rows: Tensor, type_name: str, width: int, dtype: torch.dtype) -> None:
        """`rows`: uint8 [rows, bytes of a row], on the CPU; `type_name` as `unpack_rows` takes it."""
        self._rows = rows
        self._type_name = type_name
        self._width = width
        self.dtype = dtype
        self.device = rows.device

    def index_select(self, dim: int, index: Tensor, /) -> Tensor:
        assert dim == 0, "columns are not looked up"
        if not len(index):
            return torch.empty((0, self._width), dtype=self.dtype)
        raw = self._rows.index_select(0, index).numpy()
        return torch.from_numpy(unpack_rows(raw, self._type_name)).to(self.dtype)


class WeightSource:
    """The tensors of one model. Every method that reads raises ModelError naming the tensor. Kinds of files override
    what they can do; the rest is answered from whole, unpacked tensors."""

    names: ParameterNames | None = None  # of the files; None: as the family's are

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        raise NotImplementedError

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor in `dtype` on `device`."""
        raise NotImplementedError

    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor in float32, rounded before only where the files hold no more."""
        return self.tensor(name, shape).to(torch.float32)

    def region(self, name: str, region: Region) -> Tensor:
        """Return a part of the tensor in `dtype` on `device`."""
        return tensor_region(self.tensor(name, region.shape), region)

    def packed(self, name: str, shape: tuple[int, ...]) -> Rows | None:
        """Return the matrix as products are computed with it; None: it is to be unpacked."""
        return None

    def looked_up(self, name: str, shape: tuple[int, int]) -> RowLookup | None:
        """Return the matrix for looking up single rows, which stay packed; None: it is to be unpacked."""
        return None

    def file_rows(self, name: str, shape: tuple[int, int]) -> FileRows | None:
        """Return the place of the matrix in a file; None where it cannot be packed from there."""
        return None


class RandomSource(WeightSource):
    """Normally distributed weights, ones and zeros where a norm or a bias has them; any name, any shape."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._generator = torch.Generator(device=device).manual_seed(seed)

    @override
    def has(self, name: str) -> bool:
        return not name.startswith("decoder.")

    @override
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        if len(shape) < 2:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        deviation = 1.0 / math.sqrt(shape[1])
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.normal_(0.0, deviation, generator=self._generator)
