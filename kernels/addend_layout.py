"""How the numbers that adapters add to products lie in a row, and to which products they belong; without torch."""

import enum
from typing import NamedTuple

_VECTOR = 16  # a row is read in vectors of so many numbers, at most


def up_column(out_width: int) -> int:
    """Return the column of a row of addends where those of the ups begin, for a product with gates."""
    return -(-out_width // _VECTOR) * _VECTOR


def addend_width(out_width: int, *, is_gated: bool) -> int:
    """Return the numbers in a row of addends for a product of this width: with gates, theirs and then the ups'."""
    return up_column(out_width) * (2 if is_gated else 1)


class LayerProduct(enum.IntEnum):
    """The products of a layer that adapters may add to."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


class ProductShape(NamedTuple):
    """The shape of one product, the same in all layers."""

    in_width: int
    out_width: int
    is_gated: bool = False

    @property
    def addend_width(self) -> int:
        """Return the numbers in a row of addends."""
        return addend_width(self.out_width, is_gated=self.is_gated)


def site_of(layer: int, product: LayerProduct) -> int:
    """Return the number of a product among those of all layers."""
    return layer * len(LayerProduct) + product
