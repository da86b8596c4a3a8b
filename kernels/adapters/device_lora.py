"""The rows of a pass that have adapters, as kernels on a GPU take them: arrays that come with those of the pass.

Up to GRAPH_ROWS rows their sizes depend on the number of rows alone, so that a recorded pass is replayed with others.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.adapters.adapter_tables import AdapterTable, IntArray, cut_tiles, num_tiles
from kernels.addends import Addends
from kernels.gpu_dispatch import fused_kernels
from kernels.linear import AdaptableProjection

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
