"""What follows a product with a narrow weight: bias, what adapters add, the nonlinearity."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.activation import ACTIVATIONS, Gated
from kernels.addends import Addends


class ProductEnd:
    """product [rows, columns] -> activation(product + bias) [rows, out_width].

    With gates: activation(gate) * up, of a product whose first half makes the gates.
    """

    __slots__ = ("_bias", "_is_gated", "_then", "out_width")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        activation: str | None = None,
        is_gated: bool = False,
    ) -> None:
        """`weight` [columns, ...]: for its rows and its device; `bias` [columns]; `dtype` of products. `activation`: a
        name in ACTIVATIONS, needed with gates."""
        self.out_width = len(weight) // 2 if is_gated else len(weight)
        self._bias = None if bias is None else bias.to(dtype)
        self._is_gated = is_gated
        self._then: Callable[[Tensor], Tensor] | None = (
            None if activation is None or is_gated else ACTIVATIONS[activation]
        )
        if is_gated:
            assert activation is not None, "gates without a nonlinearity"
            self._then = Gated(activation, dtype, weight.device)

    def round_results(self, unread: Tensor | None = None) -> None:
        """Round gated results for a product in FP8 as they are computed, where a kernel does so. `unread`: see Norm."""
        if isinstance(self._then, Gated):
            self._then.round_results(unread)

    def __call__(self, product: Tensor, addends: Addends | None) -> Tensor:
        if self._bias is not None:
            product = product + self._bias
        if addends is not None:
            product = addends.added_to(product, is_gated=self._is_gated)
        return product if self._then is None else self._then(product)
