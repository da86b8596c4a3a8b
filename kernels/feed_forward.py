"""Feed-forward parts of a layer: two products for all tokens, or experts, of which each token passes a few.

With experts, rows are sorted by expert, so that every expert's weights are read once and multiplied by all its rows; on
a GPU by the device itself (`kernels.sorted_experts`).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.addend_layout import LayerProduct
from kernels.gpu_dispatch import fused_kernels
from kernels.linear import AdaptableProjection, Linear, Projection
from kernels.lora import LayerAdapters

# On a CPU so many rows are computed at a time: intermediate results then stay in the cache, and in memory that was used
# before. 2048 rows of 896 x 4864 in float32: 575 ms at once, 498 ms in four parts.
_TILE_ROWS = 512


class FeedForwardPart:
    """x [rows, hidden_size] -> down(gate_up(x)), the nonlinearity and gates applied by the first product."""

    __slots__ = ("down", "gate_up", "in_width", "out_width")

    def __init__(self, gate_up: AdaptableProjection, down: AdaptableProjection) -> None:
        self.gate_up = gate_up
        self.down = down
        self.in_width, self.out_width = gate_up.in_width, down.out_width

    @property
    def products(self) -> tuple[Projection, ...]:
        """Return the products that every row passes, in order."""
        return self.gate_up, self.down

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        num_tiles = -(-x.shape[0] // _TILE_ROWS) if x.device.type == "cpu" else 1
        if num_tiles == 1:
            return self.down(self.gate_up(x))
        return torch.cat([self.down(self.gate_up(tile)) for tile in x.chunk(num_tiles)])

    def adapted(self, x: Tensor, adapters: LayerAdapters) -> Tensor:
        """Compute the same with what adapters add to both products."""
        num_tiles = -(-x.shape[0] // _TILE_ROWS) if x.device.type == "cpu" else 1
        if num_tiles == 1:
            return self._adapted(x, adapters)
        results, first = [], 0
        for tile in x.chunk(num_tiles):
            own = adapters.part(first, first + len(tile))
            results.append(self(tile) if own is None else self._adapted(tile, own))
            first += len(tile)
        return torch.cat(results)

    def _adapted(self, x: Tensor, adapters: LayerAdapters) -> Tensor:
        inner = adapters.product(LayerProduct.GATE_UP, self.gate_up, x)
        return adapters.product(LayerProduct.DOWN, self.down, inner)


class Routing(NamedTuple):
    """The experts of some rows."""

    experts: Tensor  # [rows, chosen] integers, different in a row
    shares: Tensor  # [rows, chosen] float32


class ExpertRouter:
    """Chooses the experts of each row by the softmax of a product, in float32."""

    __slots__ = ("_kernels", "_normalises", "_num_chosen", "_product", "num_experts")

    def __init__(self, weight: Tensor, num_chosen: int, *, normalises: bool) -> None:
        """`weight` [experts, hidden_size]; `normalises`: the shares of a row's experts add up to 1."""
        self.num_experts = weight.shape[0]
        self._product = Linear(weight.float())
        self._num_chosen = num_chosen
        self._normalises = normalises
        self._kernels: Any | None = fused_kernels("expert_rows", weight.device, weight.dtype)

    def __call__(self, x: Tensor) -> Routing:
        """Choose for x [rows, hidden_size]."""
        logits = self._product(x.float())
        if self._kernels is not None:
            return Routing(*self._kernels.choose(logits, self._num_chosen, normalises=self._normalises))
        probabilities = torch.softmax(logits, dim=-1)
        shares, experts = probabilities.topk(self._num_chosen, dim=-1)
        return Routing(experts, shares / shares.sum(-1, keepdim=True) if self._normalises else shares)


def grouped_products(x: Tensor, experts: Tensor, products: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Multiply each row with the products of its experts, all rows of an expert at once.

    x         [rows, in_width], rows >= 1
    experts   [rows, chosen] int64: indices of `products`, which map [n, in_width] to [n, out_width]
    returns   [rows, chosen, out_width]
    """
    chosen = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=len(products)).tolist()
    rows = x.index_select(0, order // chosen)
    groups = zip(products, counts, accumulate(counts), strict=True)
    results = [product(rows[end - count : end]) for product, count, end in groups if count]
    out = torch.empty((len(order), results[0].shape[1]), dtype=x.dtype, device=x.device)
    return out.index_copy_(0, order, torch.cat(results)).view(len(x), chosen, -1)


class Experts:
    """x [rows, hidden_size] -> the sum of the chosen experts' results, each times its share; see `ExpertRouter`."""

    __slots__ = ("_experts", "_router", "in_width", "out_width")

    def __init__(self, router: ExpertRouter, experts: Sequence[Projection]) -> None:
        """`experts`: one for each row of the router's weight, all of the same widths."""
        self._router = router
        self._experts = experts
        self.in_width, self.out_width = experts[0].in_width, experts[0].out_width

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        routing = self._router(x)
        return weighted(grouped_products(x, routing.experts, self._experts), routing.shares)


def weighted(results: Tensor, shares: Tensor) -> Tensor:
    """Add up results [rows, chosen, width], which may be overwritten, times shares [rows, chosen] -> [rows, width]."""
    # Of one dtype: PyTorch multiplies a bfloat16 in place by a float32 a hundred times as slowly.
    return results.mul_(shares[..., None].to(results.dtype)).sum(1)
