"""Products that read and give numbers in ranges of their own, as some encoders of pictures were trained."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.activation import Gated
from kernels.addends import Addends
from kernels.linear import Linear


class Ranges(NamedTuple):
    """The least and the most that a product reads, and that it gives."""

    least_in: float
    most_in: float
    least_out: float
    most_out: float


class ClippedProducts:
    """x [rows, in_width] -> the results of several products, each within its ranges, side by side."""

    __slots__ = ("_gated", "_products", "in_width", "out_width")

    def __init__(self, products: Sequence[tuple[Linear, Ranges]], gated: Gated | None = None) -> None:
        """`gated`: what is made of the results of two products, gates first."""
        self._products, self._gated = products, gated
        self.in_width = products[0][0].in_width
        self.out_width = products[0][0].out_width if gated else sum(product.out_width for product, _ in products)

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Multiply; nothing is ever added."""
        assert addends is None, "an encoder of pictures has no adapters"
        results = [
            product(x.clamp(bounds.least_in, bounds.most_in)).clamp_(bounds.least_out, bounds.most_out)
            for product, bounds in self._products
        ]
        joined = torch.cat(results, 1) if len(results) > 1 else results[0]
        return joined if self._gated is None else self._gated(joined)
