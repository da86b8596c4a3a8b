"""What adapters add to the products of a layer on a GPU: B (A x) for rows of a pass that have different adapters.

One kernel a product. Its programs take items of work from one queue, in order. First come the products with A, each of
a tile of rows of one adapter, a run of ranks and a run of inputs; then, for a tile and a run of columns, the runs of
inputs are added up and multiplied by B, and that is added to the product, rounded once. Whoever has taken one of these
waits for all of the former. Running programs have taken theirs first, so every program ends.

Rows are sorted by adapter and cut into tiles that have one (SGMV of Punica). The matrices are found by their addresses
and the tiles are counted in memory, so that a recorded launch serves whatever adapters come.

A row's sums are in one order, whatever rows are computed beside it."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching import multiprocessors, parts_of
from kernels.lora import HEAD_TILES, MODULE_WORDS, MODULES_AT, MOST_MODULES, SITE_WORDS, TILE_WORDS

RANKS = 16  # of a product with A
_INPUTS = 64  # multiplied at a time
_COLUMNS = {16: 128, 64: 64}  # of a product with B, by the rows of a tile
_RUN_INPUTS = 512  # of a product with A at least
_MOST_RUNS = 8
_SIDE_BY_SIDE = 3  # programs on a multiprocessor
_HEAD_TILES = tl.constexpr(HEAD_TILES)
_MODULES_AT = tl.constexpr(MODULES_AT)
_MODULE_WORDS = tl.constexpr(MODULE_WORDS)
_MOST_MODULES = tl.constexpr(MOST_MODULES)
_SITE_WORDS = tl.constexpr(SITE_WORDS)
_TILE_WORDS = tl.constexpr(TILE_WORDS)


class RowTiles(NamedTuple):
    """The rows of a pass that have an adapter, on the device; see kernels.lora."""

    places: Tensor  # int64 [rows]: rows of the pass, those of an adapter side by side
    tiles: Tensor  # int64 [HEAD_TILES + tiles, TILE_WORDS]; its queue is written, and left as it was
    tile_rows: int  # of a tile, at most: 16 or 64
    num_ranks: int  # of any product of any adapter, at most; a multiple of RANKS


def input_runs(in_width: int) -> tuple[int, int]:
    """Return the runs that the inputs of a product are summed in, and the inputs of each; of its width alone."""
    width = max(_RUN_INPUTS, parts_of(parts_of(in_width, _MOST_RUNS), _INPUTS) * _INPUTS)
    return parts_of(in_width, width), width


def add_adapters(product: Tensor, x: Tensor, site: int, rows: RowTiles) -> None:
    """Add B (A x) of each row's adapter at this site to product [rows of the pass, columns], rounded once. x [rows of
    the pass, in_width]; rows of both possibly strided. Launches with the same tiles run one after another."""
    assert product.stride(1) == x.stride(1) == 1, "numbers of a row are one run of memory"
    in_width = x.shape[1]
    num_runs, run_width = input_runs(in_width)
    sums = torch.empty((num_runs, len(rows.places), rows.num_ranks), dtype=torch.float32, device=x.device)
    _add_adapters[(multiprocessors(x.device) * _SIDE_BY_SIDE,)](
        product,
        x,
        sums,
        rows.places,
        rows.tiles,
        site,
        in_width,
        product.shape[1],
        x.stride(0),
        product.stride(0),
        sums.stride(0),
        num_runs,
        run_width,
        rows.num_ranks,
        ROWS=rows.tile_rows,
        RANKS=RANKS,
        INPUTS=_INPUTS,
        COLUMNS=_COLUMNS[rows.tile_rows],
    )


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch it on 16 rows without adapters. Raises Triton's errors."""
    x = torch.zeros((16, 16), dtype=dtype, device=device)
    places = torch.zeros(16, dtype=torch.int64, device=device)
    for tile_rows in _COLUMNS:
        tiles = torch.zeros((HEAD_TILES + 1, TILE_WORDS), dtype=torch.int64, device=device)
        add_adapters(x, x, 0, RowTiles(places, tiles, tile_rows, RANKS))


@triton.jit(do_not_specialize=["site", "num_runs"])
def _add_adapters(
    product,
    x,
    sums,
    places,
    tiles,
    site,
    in_width,
    num_columns,
    x_stride,
    product_stride,
    run_stride,
    num_runs,
    run_width,
    num_ranks,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    num_tiles, rank_runs = tl.load(tiles).to(tl.int32), tl.cdiv(tl.load(tiles + 1).to(tl.int32), RANKS)
    taken, shrunk, left = tiles + _TILE_WORDS, tiles + _TILE_WORDS + 1, tiles + _TILE_WORDS + 2
    num_shrinks = num_tiles * rank_runs * num_runs
    num_items = num_shrinks + num_tiles * tl.cdiv(num_columns, COLUMNS)
    item = tl.atomic_add(taken, 1, sem="relaxed").to(tl.int32)
    while item < num_items:
        following = tl.atomic_add(taken, 1, sem="relaxed").to(tl.int32)  # asked for before it is needed
        if item < num_shrinks:
            part = item // num_tiles
            run, first_rank = part // rank_runs, part % rank_runs * RANKS
            tile = tiles + (_HEAD_TILES + item % num_tiles) * _TILE_WORDS
            last = tl.minimum((run + 1) * run_width, in_width)
            own_sums = sums + run.to(tl.int64) * run_stride
            _shrink(
                x,
                own_sums,
                places,
                tile,
                site,
                first_rank,
                run * run_width,
                last,
                in_width,
                x_stride,
                num_ranks,
                ROWS,
                RANKS,
                INPUTS,
            )
            tl.debug_barrier()  # what all threads have stored is released with the count
            tl.atomic_add(shrunk, 1, sem="release")
        else:
            while tl.atomic_add(shrunk, 0, sem="acquire") < num_shrinks:
                pass
            tl.debug_barrier()
            first_column = (item - num_shrinks) // num_tiles * COLUMNS
            tile = tiles + (_HEAD_TILES + (item - num_shrinks) % num_tiles) * _TILE_WORDS
            _expand(
                product,
                sums,
                places,
                tile,
                site,
                first_column,
                product_stride,
                run_stride,
                num_runs,
                num_ranks,
                ROWS,
                RANKS,
                COLUMNS,
            )
        item = following
    if tl.atomic_add(left, 1, sem="acq_rel") == tl.num_programs(0) - 1:  # the last one leaves the queue as it was
        tl.store(taken, 0)
        tl.store(shrunk, 0)
        tl.store(left, 0)


@triton.jit
def _shrink(
    x,
    sums,
    places,
    tile,
    site,
    first_rank,
    first_input,
    last_input,
    in_width,
    x_stride,
    num_ranks,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    adapter, first_row, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    at = adapter.to(tl.pointer_type(tl.int64)) + site.to(tl.int64) * _SITE_WORDS
    own_ranks = tl.load(at).to(tl.int32)
    if first_rank < own_ranks:
        matrix = tl.load(at + 1).to(tl.pointer_type(tl.float32))
        members, ranks = tl.arange(0, ROWS), first_rank + tl.arange(0, RANKS)
        is_row, is_rank = members < count, ranks < own_ranks
        rows = tl.load(places + first_row + members, mask=is_row, other=0)
        result = tl.zeros((ROWS, RANKS), tl.float32)
        for first in range(first_input, last_input, INPUTS):
            inputs = first + tl.arange(0, INPUTS)
            is_input = inputs < last_input
            where = rows[:, None] * x_stride + inputs[None, :]
            values = tl.load(x + where, mask=is_row[:, None] & is_input[None, :], other=0.0).to(tl.float32)
            where = ranks[:, None].to(tl.int64) * in_width + inputs[None, :]
            weights = tl.load(matrix + where, mask=is_rank[:, None] & is_input[None, :], other=0.0)
            result += tl.dot(values, tl.trans(weights), input_precision="ieee")
        where = (first_row + members)[:, None] * num_ranks + ranks[None, :]
        tl.store(sums + where, result, mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def _expand(
    product,
    sums,
    places,
    tile,
    site,
    first_column,
    product_stride,
    run_stride,
    num_runs,
    num_ranks,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    adapter, first_row, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    at = adapter.to(tl.pointer_type(tl.int64)) + site.to(tl.int64) * _SITE_WORDS + _MODULES_AT
    members, columns = tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    is_row, is_changed = members < count, columns < 0
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(_MOST_MODULES):
        begin, own_columns = tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32)
        if (begin < first_column + COLUMNS) & (begin + own_columns > first_column):
            is_column = (columns >= begin) & (columns < begin + own_columns)
            is_changed |= is_column
            own_ranks, first_rank = tl.load(at + 2).to(tl.int32), tl.load(at + 3)
            matrix = tl.load(at + 4).to(tl.pointer_type(tl.float32))
            for first in range(0, own_ranks, RANKS):
                ranks = first + tl.arange(0, RANKS)
                is_rank = ranks < own_ranks
                where = (first_row + members)[:, None] * num_ranks + first_rank + ranks[None, :]
                shrunk = tl.zeros((ROWS, RANKS), tl.float32)
                for run in range(num_runs):
                    # Past the cache of a multiprocessor: others have written them meanwhile.
                    cells = sums + run * run_stride + where
                    shrunk += tl.load(cells, mask=is_row[:, None] & is_rank[None, :], other=0.0, cache_modifier=".cg")
                where = (columns - begin)[:, None].to(tl.int64) * own_ranks + ranks[None, :]
                weights = tl.load(matrix + where, mask=is_column[:, None] & is_rank[None, :], other=0.0)
                result += tl.dot(shrunk, tl.trans(weights), input_precision="ieee")
        at += _MODULE_WORDS
    rows = tl.load(places + first_row + members, mask=is_row, other=0)
    where = product + rows[:, None] * product_stride + columns[None, :]
    is_result = is_row[:, None] & is_changed[None, :]
    before = tl.load(where, mask=is_result, other=0.0).to(tl.float32)
    tl.store(where, (before + result).to(product.dtype.element_ty), mask=is_result)
