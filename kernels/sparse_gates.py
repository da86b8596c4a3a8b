"""A feed-forward part whose gates count from a cutoff on: that of a share of them if they were normally distributed."""

import math

import torch
from torch import Tensor

from kernels.activation import Gated
from kernels.linear import Projection

_TILE_ROWS = 512  # on a CPU computed at a time, as in kernels.feed_forward


class SparseFeedForward:
    """x [rows, hidden_size] -> down(activation(relu(gate - cutoff)) * up)."""

    __slots__ = ("_deviations", "_gated", "down", "gate_up", "in_width", "out_width")

    def __init__(self, gate_up: Projection, down: Projection, gated: Gated, sparsity: float) -> None:
        """`gate_up` makes both, gates first, without a nonlinearity; `sparsity`: the share, in (0, 1)."""
        self.gate_up, self.down, self._gated = gate_up, down, gated
        self.in_width, self.out_width = gate_up.in_width, down.out_width
        self._deviations = torch.erfinv(2 * torch.tensor(sparsity) - 1).mul_(math.sqrt(2.0)).to(gated.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        return torch.cat([self._part(rows) for rows in torch.split(x, _TILE_ROWS)])

    def _part(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        gates = both[:, : both.shape[1] // 2]
        exact = gates.double()  # so that sums do not depend on the order of their terms
        mean = exact.mean(1, keepdim=True)
        deviation = exact.sub_(mean).square_().mean(1, keepdim=True).sqrt_()
        gates.sub_(mean.to(x.dtype) + deviation.to(x.dtype) * self._deviations).relu_()
        return self.down(self._gated(both))
