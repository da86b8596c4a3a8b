"""Rows sorted by their experts and cut into tiles of one expert, on the device: nothing waits for the routing, so that
a CUDA graph can record it.

Worked example: rows 0, 1 and 2 choose experts 2, 0 and 2. Sorted they are rows 1, 0, 2; the tiles of expert 0 begin at
0 and end at 1, those of expert 2 begin at 1 and end at 3.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_FEW_ROWS, _ROWS = 16, 64  # of one tile


class ExpertTiles(NamedTuple):
    """The rows of a pass by expert; there are as many tiles as there could be, the last ones without rows."""

    order: Tensor  # int64 [rows * chosen]: the flattened choice that each sorted row is
    row_experts: Tensor  # int64 [rows * chosen], of the sorted rows
    experts: Tensor  # int64 [tiles]
    firsts: Tensor  # int64 [tiles]: first sorted row
    ends: Tensor  # int64 [tiles]: behind the last row of the tile's expert; up to the first row: there is none
    tile_rows: int


def expert_tiles(experts: Tensor, num_experts: int) -> ExpertTiles:
    """Sort the choices `experts` [rows, chosen] int64."""
    flat = experts.flatten()
    row_experts, order = flat.sort(stable=True)
    tile_rows = _FEW_ROWS if len(flat) <= _FEW_ROWS * num_experts else _ROWS
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    row_ends = counts.cumsum(0)
    num_tiles = (counts + tile_rows - 1) // tile_rows
    tile_ends = num_tiles.cumsum(0)
    places = torch.arange(min(num_experts, len(flat)) + len(flat) // tile_rows, device=flat.device)
    own = torch.searchsorted(tile_ends, places, right=True)
    is_used, own = own < num_experts, own.clamp_(max=num_experts - 1)
    within = places - (tile_ends - num_tiles)[own]
    firsts = (row_ends - counts)[own] + within * tile_rows
    ends = torch.where(is_used, torch.minimum(row_ends[own], firsts + tile_rows), 0)
    return ExpertTiles(order, row_experts, own, firsts, ends, tile_rows)
