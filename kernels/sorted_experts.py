"""Mixtures of experts on a GPU: rows lie sorted by expert, and every expert's weights meet its own rows alone.

All of it on the device: nothing waits for the routing, whatever the number of rows, so that a CUDA graph can record it,
and of the weights only those of chosen experts are read. Example: rows 0, 1 and 2 choose experts 2, 0 and 2 of three;
sorted they are rows 1, 0, 2, and the experts' rows end at 1, 1 and 3.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import Activated, Gated
from kernels.feed_forward import Router, Routing, weighted
from kernels.gpu_dispatch import can_launch, fused_kernels

_LIBRARY_BYTES = 16  # rows of which its operands must be multiples


class ExpertRows(NamedTuple):
    """The rows of a pass by expert."""

    rows: Tensor  # integers [rows * chosen]: the row in the pass that each sorted row is
    places: Tensor  # integers [rows, chosen]: the place of each choice among the sorted rows
    ends: Tensor  # int32 [experts]: behind each expert's last sorted row

    @property
    def experts(self) -> Tensor:
        """Return the expert of each sorted row: int64 [rows * chosen]."""
        places = torch.arange(len(self.rows), dtype=self.ends.dtype, device=self.ends.device)
        return torch.searchsorted(self.ends, places, right=True)


def rows_by_expert(experts: Tensor, num_experts: int) -> ExpertRows:
    """Sort the choices `experts` [rows, chosen] of integers, with PyTorch's operations."""
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    ends = counts.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).int()
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=flat.device))
    return ExpertRows(order // experts.shape[1], places.view(experts.shape), ends)


class ExpertProduct(Protocol):
    """One product of all experts."""

    in_width: int
    out_width: int

    def __call__(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply x [rows, in_width], rows >= 1, sorted by expert -> [rows, out_width]."""


def by_every_expert(x: Tensor, rows: ExpertRows, weights: Callable[[int], Tensor]) -> Tensor:
    """Multiply x [rows, in_width] by all `weights`, [columns, in_width] each, and keep of each row its own expert's.

    The way of plain PyTorch that reads nothing on the host; where no kernel runs.
    """
    experts, out = rows.experts[:, None], None
    for expert in range(len(rows.ends)):
        product = functional.linear(x, weights(expert))
        out = product if out is None else torch.where(experts == expert, product, out)
    assert out is not None, "no experts"
    return out


class ExpertWeights(NamedTuple):
    """The plain weights of one product of all experts."""

    weight: Tensor  # [experts, out_width, in_width]
    bias: Tensor | None = None  # [experts, out_width]


class ExpertBias:
    """The biases of one product of all experts."""

    __slots__ = ("_bias", "_kernels")

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias.contiguous()
        self._kernels: Any | None = fused_kernels("expert_rows", bias.device, bias.dtype)

    def add_to(self, product: Tensor, rows: ExpertRows) -> Tensor:
        """Add to a product [rows, out_width], contiguous, each row its expert's; in place."""
        if self._kernels is None:
            return product.add_(self._bias.index_select(0, rows.experts))
        self._kernels.add_biases(product, self._bias, rows.ends)
        return product


class StackedProduct:
    """The product with plain weights that lie side by side."""

    __slots__ = ("_bias", "_has_library", "_kernels", "_weight", "in_width", "out_width")

    def __init__(self, weights: ExpertWeights) -> None:
        """`weights`: kept."""
        self._weight = weights.weight.contiguous()
        self._bias = None if weights.bias is None else ExpertBias(weights.bias)
        device, dtype = self._weight.device, self._weight.dtype
        _, self.out_width, self.in_width = self._weight.shape
        self._has_library = has_grouped_products(self._weight)
        self._kernels: Any | None = None if self._has_library else fused_kernels("stacked_weights", device, dtype)

    def __call__(self, x: Tensor, rows: ExpertRows) -> Tensor:
        product = self._multiplied(x, rows)
        return product if self._bias is None else self._bias.add_to(product, rows)

    def _multiplied(self, x: Tensor, rows: ExpertRows) -> Tensor:
        if self._has_library:
            return functional.grouped_mm(x, self._weight.mT, offs=rows.ends)
        if self._kernels is not None:
            product: Tensor = self._kernels.multiply_sorted(x, self._weight, rows.ends)
            return product
        return by_every_expert(x, rows, self._weight.__getitem__)


def has_grouped_products(weight: Tensor) -> bool:
    """Return whether `torch.nn.functional.grouped_mm` multiplies by these weights [experts, columns, in_width] without
    the host: elsewhere it reads the rows' ends there, and calls a product for each expert."""
    device = weight.device
    if device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    major, minor = torch.cuda.get_device_capability(device)
    is_aligned = all(side * weight.element_size() % _LIBRARY_BYTES == 0 for side in weight.shape[1:])
    if not is_aligned or ((major, minor) != (9, 0) and major != 10):
        return False

    def trial() -> None:
        ends = torch.ones(2, dtype=torch.int32, device=device)
        x = torch.zeros((1, 64), dtype=weight.dtype, device=device)
        functional.grouped_mm(x, x.new_zeros((2, 64, 64)).mT, offs=ends)
        torch.cuda.synchronize(device)

    return can_launch("torch.nn.functional.grouped_mm", trial)


class SortedExperts:
    """x [rows, hidden_size] -> the sum of the chosen experts' results, each times its share."""

    __slots__ = ("_down", "_gate_up", "_gated", "_kernels", "_scales_inputs", "in_width", "out_width", "router")

    def __init__(
        self,
        router: Router,
        gate_up: Sequence[ExpertProduct],
        down: ExpertProduct,
        gated: Gated | Activated,
        *,
        scales_inputs: bool = False,
    ) -> None:
        """`gate_up`: their results lie side by side, gates first; `gated`: on the device and of the dtype of rows.
        `scales_inputs`: see Experts."""
        self._scales_inputs = scales_inputs
        self.router, self._gate_up, self._down, self._gated = router, gate_up, down, gated
        self._kernels: Any | None = fused_kernels("expert_rows", gated.device, gated.dtype)
        self.in_width, self.out_width = gate_up[0].in_width, down.out_width

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        return self.routed(x, self.router(x))

    def routed(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute the same with experts that are chosen already."""
        experts, shares = routing
        rows = self._sorted(experts)
        inputs = x.index_select(0, rows.rows)
        if self._scales_inputs:
            by_place = torch.empty(len(rows.rows), dtype=shares.dtype, device=x.device)
            by_place.scatter_(0, rows.places.flatten().long(), shares.flatten())
            inputs, shares = inputs.mul_(by_place[:, None].to(x.dtype)), torch.ones_like(shares)
        inner = [product(inputs, rows) for product in self._gate_up]
        results = self._down(self._gated(inner[0] if len(inner) == 1 else torch.cat(inner, dim=1)), rows)
        if self._kernels is not None:
            out: Tensor = self._kernels.add_up(results, rows.places, shares)
            return out
        by_choice = results.index_select(0, rows.places.flatten())
        return weighted(by_choice.view(*experts.shape, -1), shares)

    def _sorted(self, experts: Tensor) -> ExpertRows:
        if self._kernels is None:
            return rows_by_expert(experts, self.router.num_experts)
        return ExpertRows(*self._kernels.sort(experts.int(), self.router.num_experts))


def stacked_experts(
    router: Router,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: str,
    *,
    is_gated: bool = True,
    scales_inputs: bool = False,
) -> SortedExperts:
    """Return the mixture with plain weights `gate_up` [experts, 2 * width, hidden_size], gates first, and `down`
    [experts, hidden_size, width], both kept. `activation`: see Gated. `is_gated`: False: there are no gates.
    `scales_inputs`: see Experts."""
    gated = (Gated if is_gated else Activated)(activation, gate_up.weight.dtype, gate_up.weight.device)
    products = ([StackedProduct(gate_up)], StackedProduct(down), gated)
    return SortedExperts(router, *products, scales_inputs=scales_inputs)
