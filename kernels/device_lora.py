"""The rows of a pass that have adapters, as kernels on a GPU take them: arrays that come with those of the pass.

Up to GRAPH_ROWS rows their sizes depend on the number of rows alone, so that a recorded pass is replayed with others.

Kernels find the matrices of adapters by tables of addresses. An adapter has one table in the device's memory, int64
[sites, SITE_WORDS]:

    ranks        of all modules of the product, one after another; 0: the adapter adds nothing
    A            address, float32 [ranks, in_width]
    3 modules    each its first column in the product, its columns (0: absent), its ranks, the first of them,
                 and the address of scale * B, float32 [columns, ranks]

A tile is int64 [TILE_WORDS]: the address of a table, the first of its rows among the sorted ones, their number. Before
the tiles of a pass are two of other words: how many have rows, and the most ranks of a product; then the queue of a
launch, zeros before and after it: items of work that were taken, products with A that are done, programs that are.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.addend_layout import ProductShape, up_column
from kernels.addends import Addends
from kernels.cpu.lora import LoraModule
from kernels.gpu_dispatch import fused_kernels
from kernels.linear import AdaptableProjection

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
        present = [(module, module.matrices) for module in modules if module.matrices is not None]
        assert len(present) <= MOST_MODULES, f"{len(present)} modules of one product"
        if not present:
            return
        stacked = self._moved(torch.cat([a.float() for _, (a, _) in present]))
        words, rank = [len(stacked), stacked.data_ptr()], 0
        for module, (a, b) in present:
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


GRAPH_ROWS = 512
_SMALL_TILE, _LARGE_TILE = 16, 64  # rows: of decodes, of prompts
_GRAPH_ADAPTERS = 32  # a recorded pass has so many tiles beside those that its rows fill
_GRAPH_RANKS = 192  # of a product: three modules of rank 64
_RANKS = 16  # see kernels.gpu.lora
_NO_ROWS = np.empty(0, np.int64)


def device_kernels(dtype: torch.dtype, device: torch.device) -> Any | None:
    """Return the module that multiplies inputs of this dtype on a device; None: it has no such kernels."""
    return fused_kernels("lora", device, dtype)


class DevicePlan:
    """The arrays of one pass, on the host."""

    def __init__(
        self,
        kernels: Any,
        num_rows: int,
        tables: Sequence[AdapterTable] = (),
        ends: Sequence[int] = (),
        places: IntArray = _NO_ROWS,
    ) -> None:
        """Group i: rows places[ends[i - 1] : ends[i]] of a pass of `num_rows` have tables[i]; maybe there is none.

        `kernels`: see device_kernels.
        """
        self._kernels = kernels
        self._tile_rows = _SMALL_TILE if num_rows <= GRAPH_ROWS else _LARGE_TILE
        counts = np.diff([0, *ends]).tolist()
        needed = num_tiles(counts, self._tile_rows)
        own_ranks = max((table.num_ranks for table in tables), default=0)
        recorded = min(num_rows, num_rows // _SMALL_TILE + _GRAPH_ADAPTERS)
        # Whether a recorded pass of as many rows may read them.
        self.is_of_a_graph = num_rows <= GRAPH_ROWS and needed <= recorded and own_ranks <= _GRAPH_RANKS
        self._num_ranks = _GRAPH_RANKS if self.is_of_a_graph else max(-(-own_ranks // _RANKS), 1) * _RANKS
        padded = np.zeros(num_rows, np.int64)
        padded[: len(places)] = places
        addresses = [table.address for table in tables]
        count = recorded if self.is_of_a_graph else needed
        tiles = cut_tiles(addresses, ends, self._tile_rows, count, own_ranks)
        self.host_arrays = (padded, tiles)

    def bound(self, tensors: Sequence[Tensor]) -> "DeviceRows":
        """Return the rows. `tensors`: the host arrays on the device, flat or not."""
        places, tiles = tensors
        tiles = tiles.view(self.host_arrays[1].shape)
        return DeviceRows(self._kernels.RowTiles(places, tiles, self._tile_rows, self._num_ranks), self._kernels)


class DeviceRows(NamedTuple):
    """The rows of one pass that have an adapter."""

    rows: Any  # RowTiles of kernels.gpu.lora
    kernels: Any

    def product(self, site: int, multiply: AdaptableProjection, x: Tensor) -> Tensor:
        """Multiply x [rows, in_width] of the whole pass, with what the adapters add to this product."""
        return multiply(x, Addends.by_device(lambda product: self.kernels.add_adapters(product, x, site, self.rows)))

    def part(self, first: int, last: int) -> "DeviceRows":
        """Return the rows of a part of the pass, which is all of it: on a device nothing is cut."""
        assert first == 0, f"rows from {first} on"
        assert last == len(self.rows.places), f"{last} rows of {len(self.rows.places)}"
        return self
