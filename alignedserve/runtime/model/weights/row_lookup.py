"""The embedding of a model: rows that are looked up by token, whole in memory or unpacked as they are asked for."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.weight_blocks.block_values import unpack_rows


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


@runtime_checkable
class LookupSource(Protocol):
    """A source of weights whose matrices may stay packed where single rows of them are looked up."""

    def looked_up(self, name: str, shape: tuple[int, int]) -> RowLookup | None:
        """Return the matrix for that; None when it is to be unpacked. Raises ModelError naming it."""


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
