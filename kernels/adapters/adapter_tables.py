"""How kernels on a GPU find the matrices of adapters: tables of addresses, and tiles of rows that have one adapter.

An adapter has one table in the device's memory, int64 [sites, SITE_WORDS]:

    ranks        of all modules of the product, one after another; 0: it adds nothing
    A            address, float32 [ranks, in_width]
    3 modules    each its first column in the product, its columns (0: there is none), its ranks, the first of them,
                 and the address of scale * B, float32 [columns, ranks]

A tile is int64 [TILE_WORDS]: the address of a table, the first of its rows among the sorted ones, their number. Before
the tiles of a pass are two of other words: how many have rows, and the most ranks of a product; then the queue of a
launch, zeros before and after it: items of work that were taken, products with A that are done, programs that are.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.addend_layout import ProductShape, up_column
from kernels.cpu.lora import LoraModule

MOST_MODULES = 3  # of a product: queries, keys, values
MODULES_AT, MODULE_WORDS = 2, 5
SITE_WORDS = MODULES_AT + MOST_MODULES * MODULE_WORDS
TILE_WORDS, HEAD_TILES = 3, 2

IntArray = npt.NDArray[np.int64]


class AdapterTable:
    """The matrices of one adapter on a device, and where they lie."""

    def __init__(self, num_sites: int, device: torch.device) -> None:
        self._words = np.zeros((num_sites, SITE_WORDS), np.int64)
        self._device = device
        self._kept: list[Tensor] = []  # what the addresses point to
        self._table: Tensor | None = None
        self.num_ranks = 0  # of any product, at most
        self.num_bytes = 0

    def set(self, site: int, shape: ProductShape, modules: Sequence[LoraModule]) -> None:
        assert self._table is None, "the table is in use"
        own = [(module, module.matrices) for module in modules if module.matrices is not None]
        assert len(own) <= MOST_MODULES, f"{len(own)} modules of one product"
        if not own:
            return
        stacked = self._moved(torch.cat([a.float() for _, (a, _) in own]))
        words, rank = [len(stacked), stacked.data_ptr()], 0
        for module, (a, b) in own:
            words += [_column(module, shape), module.num_columns, len(a), rank, self._moved(b.float()).data_ptr()]
            rank += len(a)
        self._words[site, : len(words)] = words
        self.num_ranks = max(self.num_ranks, rank)

    @property
    def address(self) -> int:
        if self._table is None:
            self._table = torch.from_numpy(self._words).to(self._device, copy=True)
        return self._table.data_ptr()

    def _moved(self, matrix: Tensor) -> Tensor:
        moved = matrix.contiguous().to(self._device, copy=True)
        self._kept.append(moved)
        self.num_bytes += moved.nbytes
        return moved


def _column(module: LoraModule, shape: ProductShape) -> int:
    first_up = up_column(shape.out_width)
    is_up = shape.is_gated and module.first_column >= first_up
    return module.first_column - first_up + shape.out_width if is_up else module.first_column


def num_tiles(counts: Sequence[int], tile_rows: int) -> int:
    return sum(-(-count // tile_rows) for count in counts)


def cut_tiles(addresses: Sequence[int], ends: Sequence[int], tile_rows: int, count: int, most_ranks: int) -> IntArray:
    """Cut sorted rows into `count` tiles, behind their head; the last ones may have no rows.

    Group i: the adapter at addresses[i], rows [ends[i - 1], ends[i]).
    """
    tiles = np.zeros((HEAD_TILES + count, TILE_WORDS), np.int64)
    at = HEAD_TILES
    for address, (first, last) in zip(addresses, pairwise([0, *ends]), strict=True):
        for begin in range(first, last, tile_rows):
            tiles[at] = address, begin, min(tile_rows, last - begin)
            at += 1
    tiles[0, :2] = at - HEAD_TILES, most_ranks
    return tiles
