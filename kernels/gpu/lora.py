"""What adapters add to the products of a layer on a GPU: B (A x) for rows of a pass that have different adapters.

Two kernels. The first multiplies A, one program per tile of rows of one adapter, run of ranks and run of inputs; the
second adds the runs of inputs up, multiplies B and adds that to the product, rounded once. Rows are sorted by adapter
and cut into tiles that have one (SGMV of Punica, here with as many tiles as there may be: those without rows end at
once). The matrices are found by their addresses, so that a recorded launch serves whatever adapters come.

A row's sums are in one order, whatever rows are computed beside it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adapter_tables import MODULE_WORDS, MODULES_AT, SITE_WORDS, TILE_WORDS

RANKS = 16  # of one program of the first kernel
_INPUTS = 64  # multiplied at a time
_COLUMNS = 64  # of one program of the second
_RUN_INPUTS = 512  # of one program of the first at least
_MOST_RUNS = 8
_MODULES_AT = tl.constexpr(MODULES_AT)
_MODULE_WORDS = tl.constexpr(MODULE_WORDS)
_SITE_WORDS = tl.constexpr(SITE_WORDS)
_TILE_WORDS = tl.constexpr(TILE_WORDS)


class RowTiles(NamedTuple):
    """The rows of a pass that have an adapter, on the device; see kernels.adapter_tables."""

    places: Tensor  # int64 [rows]: rows of the pass, those of an adapter side by side
    tiles: Tensor  # int64 [tiles, TILE_WORDS]
    tile_rows: int  # of a tile, at most: 16 or 64
    num_ranks: int  # of any product of any adapter, at most; a multiple of RANKS


def input_runs(in_width: int) -> tuple[int, int]:
    """Return the runs that the inputs of a product are summed in, and the inputs of each; of its width alone."""
    width = max(_RUN_INPUTS, triton.cdiv(triton.cdiv(in_width, _MOST_RUNS), _INPUTS) * _INPUTS)
    return triton.cdiv(in_width, width), width


def shrink(x: Tensor, site: int, rows: RowTiles) -> Tensor:
    """Multiply x [rows of the pass, in_width], rows possibly strided, by A of each row's adapter at this site.

    Returns float32 [runs, rows, num_ranks], to be added up over the runs; undefined behind a row's own ranks.
    """
    in_width = x.shape[1]
    assert x.stride(1) == 1, "inputs of a row are one run of memory"
    num_runs, run_width = input_runs(in_width)
    sums = torch.empty((num_runs, len(rows.places), rows.num_ranks), dtype=torch.float32, device=x.device)
    _shrink[(len(rows.tiles), rows.num_ranks // RANKS, num_runs)](
        x,
        sums,
        rows.places,
        rows.tiles,
        site,
        in_width,
        x.stride(0),
        sums.stride(0),
        run_width,
        rows.num_ranks,
        ROWS=rows.tile_rows,
        RANKS=RANKS,
        INPUTS=_INPUTS,
    )
    return sums


def expand(sums: Tensor, site: int, rows: RowTiles, product: Tensor, most_columns: int, num_modules: int) -> None:
    """Add B of each row's adapter, times the sums, to product [rows of the pass, columns], rounded once.

    `most_columns` of one module, `num_modules` of the product: at most.
    """
    assert product.stride(1) == 1, "results of a row are one run of memory"
    column_tiles = triton.cdiv(most_columns, _COLUMNS)
    _expand[(len(rows.tiles), column_tiles, num_modules)](
        product,
        sums,
        rows.places,
        rows.tiles,
        site,
        product.stride(0),
        sums.stride(0),
        len(sums),
        rows.num_ranks,
        ROWS=rows.tile_rows,
        RANKS=RANKS,
        COLUMNS=_COLUMNS,
    )


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch both on 16 rows without adapters. Raises Triton's errors."""
    x = torch.zeros((16, 16), dtype=dtype, device=device)
    places = torch.zeros(16, dtype=torch.int64, device=device)
    for tile_rows in (16, 64):
        tiles = torch.zeros((1, TILE_WORDS), dtype=torch.int64, device=device)
        rows = RowTiles(places, tiles, tile_rows, RANKS)
        expand(shrink(x, 0, rows), 0, rows, x, 16, 1)


@triton.jit
def _tile_of(tiles):
    """Return the address of the adapter's sites, the first row among the sorted ones and the number of rows."""
    tile = tiles + tl.program_id(0).to(tl.int64) * _TILE_WORDS
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)


@triton.jit(do_not_specialize=["site"])
def _shrink(
    x,
    sums,
    places,
    tiles,
    site,
    in_width,
    x_stride,
    run_stride,
    run_width,
    num_ranks,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    adapter, first_row, count = _tile_of(tiles)
    first_rank = tl.program_id(1) * RANKS
    own_ranks = 0
    if count > 0:
        at = adapter.to(tl.pointer_type(tl.int64)) + site.to(tl.int64) * _SITE_WORDS
        own_ranks = tl.load(at).to(tl.int32)
        if first_rank < own_ranks:
            matrix = tl.load(at + 1).to(tl.pointer_type(tl.float32))
            members, ranks = tl.arange(0, ROWS), first_rank + tl.arange(0, RANKS)
            is_row, is_rank = members < count, ranks < own_ranks
            rows = tl.load(places + first_row + members, mask=is_row, other=0)
            run = tl.program_id(2)
            last = tl.minimum((run + 1) * run_width, in_width)
            result = tl.zeros((ROWS, RANKS), tl.float32)
            for first in range(run * run_width, last, INPUTS):
                inputs = first + tl.arange(0, INPUTS)
                is_input = inputs < last
                where = rows[:, None] * x_stride + inputs[None, :]
                values = tl.load(x + where, mask=is_row[:, None] & is_input[None, :], other=0.0).to(tl.float32)
                where = ranks[:, None].to(tl.int64) * in_width + inputs[None, :]
                weights = tl.load(matrix + where, mask=is_rank[:, None] & is_input[None, :], other=0.0)
                result += tl.dot(values, tl.trans(weights), input_precision="ieee")
            where = run.to(tl.int64) * run_stride + (first_row + members)[:, None] * num_ranks + ranks[None, :]
            tl.store(sums + where, result, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["site", "num_runs"])
def _expand(
    product,
    sums,
    places,
    tiles,
    site,
    product_stride,
    run_stride,
    num_runs,
    num_ranks,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    adapter, first_row, count = _tile_of(tiles)
    first_column = tl.program_id(1) * COLUMNS
    if count > 0:
        at = adapter.to(tl.pointer_type(tl.int64)) + site.to(tl.int64) * _SITE_WORDS
        at += _MODULES_AT + tl.program_id(2) * _MODULE_WORDS
        begin, num_columns, own_ranks, first_rank = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        if first_column < num_columns:
            matrix = tl.load(at + 4).to(tl.pointer_type(tl.float32))
            members, columns = tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
            is_row, is_column = members < count, columns < num_columns
            result = tl.zeros((ROWS, COLUMNS), tl.float32)
            for first in range(0, own_ranks.to(tl.int32), RANKS):
                ranks = first + tl.arange(0, RANKS)
                is_rank = ranks < own_ranks
                where = (first_row + members)[:, None] * num_ranks + first_rank + ranks[None, :]
                shrunk = tl.zeros((ROWS, RANKS), tl.float32)
                for run in range(num_runs):
                    own = sums + run * run_stride
                    shrunk += tl.load(own + where, mask=is_row[:, None] & is_rank[None, :], other=0.0)
                where = columns[:, None].to(tl.int64) * own_ranks + ranks[None, :]
                weights = tl.load(matrix + where, mask=is_column[:, None] & is_rank[None, :], other=0.0)
                result += tl.dot(shrunk, tl.trans(weights), input_precision="ieee")
            rows = tl.load(places + first_row + members, mask=is_row, other=0)
            where = product + rows[:, None] * product_stride + (begin + columns)[None, :]
            is_result = is_row[:, None] & is_column[None, :]
            before = tl.load(where, mask=is_result, other=0.0).to(tl.float32)
            tl.store(where, (before + result).to(product.dtype.element_ty), mask=is_result)
