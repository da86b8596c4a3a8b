"""A mixture of experts whose weights stay as stored, on a GPU: every row passes its own experts, none waits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.activation import Gated
from kernels.feed_forward import ExpertRouter, weighted
from kernels.narrow.grouped_linear import ExpertTiles, GroupedWeight, SortedLinear, expert_tiles


class ExpertProduct:
    """One product of all experts."""

    __slots__ = ("_orders", "_product", "in_width", "out_width")

    def __init__(self, weight: GroupedWeight, orders: Tensor | None, *, dtype: torch.dtype) -> None:
        """`weight`: of all experts, in a dimension in front; `orders` int64 [experts, in_width], of inputs; None: as
        they come. Both kept."""
        self._product, self._orders = SortedLinear(weight, dtype=dtype), orders
        self.in_width, self.out_width = self._product.in_width, self._product.out_width

    def __call__(self, x: Tensor, tiles: ExpertTiles) -> Tensor:
        """Multiply x [rows, in_width], sorted by expert -> [rows, out_width]."""
        if self._orders is not None:
            x = x.gather(1, self._orders[tiles.row_experts])
        return self._product(x, tiles)


class GroupedExperts:
    """x [rows, hidden_size] -> the sum of the chosen experts' results, each times its share."""

    __slots__ = ("_down", "_gate_up", "_gated", "_router", "in_width", "out_width")

    def __init__(
        self, router: ExpertRouter, gate_up: Sequence[ExpertProduct], down: ExpertProduct, gated: Gated
    ) -> None:
        """`gate_up`: their results lie side by side, gates first."""
        self._router, self._gate_up, self._down, self._gated = router, gate_up, down, gated
        self.in_width, self.out_width = gate_up[0].in_width, down.out_width

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        experts, shares = self._router(x)
        tiles = expert_tiles(experts, self._router.num_experts)
        rows = x.index_select(0, tiles.order // experts.shape[1])
        inner = [product(rows, tiles) for product in self._gate_up]
        results = self._down(self._gated(inner[0] if len(inner) == 1 else torch.cat(inner, dim=1)), tiles)
        by_choice = torch.empty_like(results).index_copy_(0, tiles.order, results)
        return weighted(by_choice.view(*experts.shape, -1), shares)
