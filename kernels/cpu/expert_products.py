"""Both products of a mixture's experts in one call of the native kernels (kernels/csrc/expert_products.cpp)."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.cpu.decode_pass import NativeProduct
from kernels.cpu.native import load_native

_native = load_native("ExpertProducts")
_DTYPES = (torch.float32, torch.bfloat16)


@runtime_checkable
class TwoProducts(Protocol):
    """An expert: one product behind another."""

    @property
    def products(self) -> Sequence[object]:
        """Return the products that every row passes, in order."""


class ExpertProducts:
    """Rows sorted by expert -> their experts' results. See `native_experts`."""

    __slots__ = ("_kernel", "_num_experts", "_parts", "in_width", "out_width")

    def __init__(self, parts: Sequence[tuple[Any, Any]], in_width: int, out_width: int) -> None:
        self._parts = parts  # keeps what the kernel refers to
        self._num_experts = len(parts)
        self._kernel = _native.ExpertProducts([first for first, _ in parts], [second for _, second in parts])
        self.in_width, self.out_width = in_width, out_width

    def __call__(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        assert len(counts) == self._num_experts, f"not {self._num_experts} numbers of rows: {len(counts)}"
        assert x.shape == (sum(counts), self.in_width), f"not {sum(counts)} rows of {self.in_width}: {x.shape}"
        assert x.is_contiguous(), "rows are one run of memory"
        assert x.dtype in _DTYPES, f"no native kernel for {x.dtype}"
        out = torch.empty((len(x), self.out_width), dtype=x.dtype)
        is_bfloat16 = x.dtype == torch.bfloat16
        self._kernel.run(x.data_ptr(), out.data_ptr(), list(counts), is_bfloat16, torch.get_num_threads())
        return out


def native_experts(experts: Sequence[object], in_width: int, out_width: int) -> ExpertProducts | None:
    """Return the call for these experts; None: there is none, where kernels or products are others."""
    parts = [_parts(expert) for expert in experts]
    known = [part for part in parts if part is not None]
    return None if _native is None or len(known) < len(parts) else ExpertProducts(known, in_width, out_width)


def _parts(expert: object) -> tuple[Any, Any] | None:
    if not isinstance(expert, TwoProducts):
        return None
    native = [product.native_parts if isinstance(product, NativeProduct) else () for product in expert.products]
    if [len(parts) for parts in native] != [1, 1]:
        return None
    return native[0][0], native[1][0]
