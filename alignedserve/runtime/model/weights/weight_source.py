"""A source of weights gives one tensor at a time: unpacked, packed as in its file, or in part.

The part of a source that one rank reads: of packed weights any rows, but only columns that are whole blocks."""

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.runtime.model.sharding.regions import Region, chosen_rows, tensor_region
from alignedserve.runtime.model.sharding.tensor_shard import Span
from alignedserve.runtime.model.weight_names import ParameterNames
from alignedserve.runtime.model.weights.packed_products import (
    BlockRows,
    Float8Rows,
    GroupedRows,
    Int8Rows,
    PlainRows,
    Rows,
)
from kernels.block_formats import format_named
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


class ShardedSource(WeightSource):
    """A source for shapes of the rank."""

    def __init__(self, source: WeightSource, regions: Mapping[str, Region]) -> None:
        """`regions`: of tensors that the rank has in part."""
        super().__init__(source.dtype, source.device)
        self.names, self._source, self._regions = source.names, source, regions

    @override
    def has(self, name: str) -> bool:
        return self._source.has(name)

    @override
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        region = self._regions.get(name)
        if region is None:
            return self._source.tensor(name, shape)
        if region.is_held:
            part = self._source.region(name, region)
        else:
            part = tensor_region(self._source.tensor(name, region.shape), region)
        assert part.shape == shape, f"{name}: the rank's part is {part.shape}, not {shape}"
        return part

    @override
    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert name not in self._regions, f"{name} is divided"
        return self._source.exact(name, shape)

    @override
    def packed(self, name: str, shape: tuple[int, ...]) -> Rows | None:
        region = self._regions.get(name)
        if region is None:
            return self._source.packed(name, shape)
        whole = self._source.packed(name, region.shape)
        return None if whole is None else packed_region(whole, region)

    @override
    def file_rows(self, name: str, shape: tuple[int, int]) -> FileRows | None:
        region = self._regions.get(name)
        if region is None:
            return self._source.file_rows(name, shape)
        assert region.width is not None, f"{name} is a vector"
        whole = self._source.file_rows(name, (region.num_rows, region.width))
        if whole is None or region.columns is not None or len(region.rows) > 1:
            return None
        (rows,) = region.rows
        return whole._replace(
            offset=whole.offset + rows.start * region.width * whole.dtype.itemsize, num_rows=rows.size
        )


def packed_region(weight: Rows, region: Region) -> Rows | None:
    """Return the part of a packed weight; None: its columns do not end where blocks end, or are out of order."""
    if isinstance(weight, GroupedRows):
        return _grouped(weight, region)
    if not isinstance(weight, BlockRows):
        return _columns(_rows(weight, region), region.columns)
    if region.columns is None:
        return weight._replace(rows=chosen_rows(weight.rows, region))
    layout, columns = format_named(weight.type_name), region.columns
    if weight.order is not None or columns.start % layout.num_values or columns.stop % layout.num_values:
        return None
    span = Span(columns.start // layout.num_values, columns.stop // layout.num_values).times(layout.num_bytes)
    rows = chosen_rows(weight.rows, region)[:, span.start : span.stop].contiguous()
    return BlockRows(rows, weight.type_name, columns.size)


def _grouped(weight: GroupedRows, region: Region) -> Rows | None:
    chosen, columns = weight.changed(lambda rows: chosen_rows(rows, region)), region.columns
    if columns is None:
        return chosen.changed(lambda rows: rows.clone(memory_format=torch.contiguous_format))
    group = chosen.weight.together
    if weight.order is not None or columns.start % group or columns.stop % group:
        return None
    return GroupedRows(chosen.weight.inputs(columns.start, columns.stop))


def _rows(weight: Int8Rows | Float8Rows | PlainRows, region: Region) -> Int8Rows | Float8Rows | PlainRows:
    if isinstance(weight, Float8Rows):
        raw = chosen_rows(weight.rows.view(torch.uint8), region).view(weight.rows.dtype)
        return Float8Rows(raw, chosen_rows(weight.scales, region))
    if isinstance(weight, Int8Rows):
        return Int8Rows(chosen_rows(weight.rows, region), chosen_rows(weight.scales, region))
    return PlainRows(chosen_rows(weight.rows, region))


def _columns(weight: Int8Rows | Float8Rows | PlainRows, columns: Span | None) -> Rows:
    part = weight.rows if columns is None else weight.rows[:, columns.start : columns.stop]
    return weight._replace(rows=part.clone(memory_format=torch.contiguous_format))
