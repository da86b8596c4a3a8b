"""Parts of packed weights: any rows, but only columns that are whole blocks."""

import torch
from torch import Tensor

from alignedserve.runtime.model.sharding.regions import Region
from alignedserve.runtime.model.sharding.tensor_shard import Span
from alignedserve.runtime.model.weights.packed_products import (
    BlockRows,
    Float8Rows,
    GroupedRows,
    Int8Rows,
    PlainRows,
    Rows,
)
from kernels.weight_blocks.block_formats import format_named


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
    own, columns = weight.changed(lambda rows: chosen_rows(rows, region)), region.columns
    if columns is None:
        return own.changed(lambda rows: rows.clone(memory_format=torch.contiguous_format))
    group = own.weight.together
    if weight.order is not None or columns.start % group or columns.stop % group:
        return None
    return GroupedRows(own.weight.inputs(columns.start, columns.stop))


def tensor_region(tensor: Tensor, region: Region) -> Tensor:
    part = chosen_rows(tensor, region)
    if region.columns is not None:
        part = part[:, region.columns.start : region.columns.stop]
    return part.clone(memory_format=torch.contiguous_format) if region.is_held else torch.zeros_like(part)


def chosen_rows(rows: Tensor, region: Region) -> Tensor:
    """Return the region's rows of a tensor that has all; a view where they lie one after another."""
    parts = [rows[span.start : span.stop] for span in region.rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
