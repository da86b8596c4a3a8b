"""Products with weights that stay in the blocks of their file, for modules that read the same input."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.activation import Gated
from kernels.cpu.block_quantized_linear import BlockQuantizedLinear, JoinedLinear
from kernels.linear import Projection

BLOCK_DTYPES = (torch.float32, torch.bfloat16)  # of inputs and results


class BlockRows(NamedTuple):
    """The weight of one module as the file has it."""

    rows: Tensor  # uint8 [rows, bytes of a row]
    type_name: str
    in_width: int


def block_product(
    parts: Sequence[BlockRows], bias: Tensor | None, dtype: torch.dtype, activation: str | None, is_gated: bool
) -> Projection:
    """Return the product with the stacked weights, then the nonlinearity; gates in the first of two parts."""
    if len({part.type_name for part in parts}) == 1:
        rows = torch.cat([part.rows for part in parts]) if len(parts) > 1 else parts[0].rows
        type_name, in_width = parts[0].type_name, parts[0].in_width
        return BlockQuantizedLinear(
            rows, type_name, in_width, bias, dtype=dtype, activation=activation, is_gated=is_gated
        )
    sizes = [len(part.rows) for part in parts]
    biases = [None] * len(parts) if bias is None else torch.split(bias, sizes)
    joined = JoinedLinear(
        [
            BlockQuantizedLinear(part.rows, part.type_name, part.in_width, part_bias, dtype=dtype)
            for part, part_bias in zip(parts, biases, strict=True)
        ]
    )
    if activation is None:
        return joined
    assert is_gated, "one module has blocks of one type"
    return _GatedProduct(joined, activation, dtype)


class _GatedProduct:
    """A product, then activation(gate) * up of its halves."""

    __slots__ = ("_gated", "_product", "in_width", "out_width")

    def __init__(self, product: Projection, activation: str, dtype: torch.dtype) -> None:
        self._product = product
        self._gated = Gated(activation, dtype, torch.device("cpu"))
        self.in_width, self.out_width = product.in_width, product.out_width // 2

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, in_width] -> [rows, out_width]."""
        return self._gated(self._product(x))
