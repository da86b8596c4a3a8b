"""The part of a source that one rank reads: of packed weights any rows, but only columns that are whole blocks."""

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.runtime.model.sharding.regions import Region, chosen_rows, tensor_region
from alignedserve.runtime.model.sharding.tensor_shard import Span
from alignedserve.runtime.model.weights.packed_products import (
    BlockRows,
    Float8Rows,
    GroupedRows,
    Int8Rows,
    PlainRows,
    Rows,
)
from alignedserve.runtime.model.weights.weight_source import WeightSource
from kernels.block_formats import format_named
from kernels.cpu.packed_linear import FileRows


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
