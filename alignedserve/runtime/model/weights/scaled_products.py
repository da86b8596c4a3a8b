"""Products whose results are multiplied: the factors are in the weights."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from alignedserve.core.errors import UnsupportedModel
from alignedserve.runtime.model.weights.packed_products import PlainRows
from alignedserve.runtime.model.weights.product_reader import NONE, Nonlinearity, ProductReader
from kernels.linear import AdaptableProjection


class ScaledModule(NamedTuple):
    """A module without biases, and the factors of its rows: of so many each."""

    name: str
    factors: tuple[tuple[int, float], ...]

    @property
    def num_rows(self) -> int:
        return sum(count for count, _ in self.factors)


def scaled_product(
    read: ProductReader, modules: Sequence[ScaledModule], in_width: int, then: Nonlinearity = NONE
) -> AdaptableProjection:
    """Return the product of stacked modules. Raises UnsupportedModel where a weight is not plain."""
    rows = []
    for module in modules:
        plain = read.rows(module.name, module.num_rows, in_width)
        if not isinstance(plain, PlainRows):
            raise UnsupportedModel(f"{module.name} is quantised, and the factors of its rows cannot be put into it.")
        own, device = module.factors, plain.rows.device
        factors = torch.cat([torch.full((count, 1), factor, device=device) for count, factor in own])
        rows.append(PlainRows((plain.rows.float() * factors).to(plain.rows.dtype)))
    return read.product([module.name for module in modules], rows, None, then)
