"""Matrix products with weights packed for the native kernels (kernels/csrc/products.h).

Panels of 32 columns are read from memory once and multiplied by up to 14 rows at a time, whose sums stay in registers;
meanwhile the next panel is fetched. Bias, nonlinearity and gates are applied before a result is written.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.cpu.native import load_native

_ELEMENTS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
INT8 = "int8"


_native = load_native("PackedWeight")


def packed_levels(element: torch.dtype | str, device: torch.device) -> tuple[str, ...]:
    """Return the levels, best first, that are built and multiply weights of `element` (a dtype, or INT8) here."""
    name = element if isinstance(element, str) else _ELEMENTS.get(element)
    if _native is None or device.type != "cpu" or name is None:
        return ()
    return tuple(_native.product_levels(name))


def fits(weight: Tensor) -> bool:
    """Return whether a row of this weight consists of whole operands of one instruction: pairs of bfloat16."""
    return weight.dtype != torch.bfloat16 or weight.shape[1] % 2 == 0


class PackedLinear:
    """x [rows, in_width] -> activation(x @ weight.T + bias) [rows, out_width], dtype of the weight.

    With gates, the first half of the weight's rows: activation(gate) * up. With `element` INT8, see `int8_linear`: one
    scale per output, and one per row of inputs.
    """

    __slots__ = ("_dtype", "_weight", "in_width", "out_width")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        level: str,
        element: torch.dtype | str,
        activation: str | None = None,
        is_gated: bool = False,
    ) -> None:
        """`weight` [columns, in_width] and `bias` [columns]: read here, not kept. `element`: the weight's dtype, or
        INT8. `activation`: a name in ACTIVATIONS. Raises ValueError for an unavailable level, MemoryError when
        the packed weight does not fit."""
        columns, self.in_width = weight.shape
        self.out_width = columns // 2 if is_gated else columns
        self._dtype = weight.dtype
        weight = weight.contiguous()
        bias = None if bias is None else bias.float().contiguous()
        name = element if isinstance(element, str) else _ELEMENTS[element]
        address = 0 if bias is None else bias.data_ptr()
        shape = (columns, self.in_width)
        source = (weight.data_ptr(), weight.dtype == torch.bfloat16, *shape, address)
        self._weight = _native.PackedWeight(level, name, *source, activation or "none", is_gated)

    @property
    def native_parts(self) -> tuple[Any, ...]:
        """Return the native product, see `kernels.cpu.decode_pass`."""
        return (self._weight,)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the packed weight."""
        return int(self._weight.num_bytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, in_width], rows >= 1, possibly strided -> [rows, out_width]."""
        num_rows = x.shape[0]
        assert x.ndim == 2, f"not rows: {x.shape}"
        assert x.shape[1] == self.in_width, f"not rows of {self.in_width}: {x.shape}"
        assert x.dtype == self._dtype, f"inputs are {self._dtype}, not {x.dtype}"
        if self.in_width > 1 and x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((num_rows, self.out_width), dtype=x.dtype)
        is_bfloat16 = x.dtype == torch.bfloat16
        self._weight.run(x.data_ptr(), x.stride(0), out.data_ptr(), num_rows, is_bfloat16, torch.get_num_threads())
        return out
