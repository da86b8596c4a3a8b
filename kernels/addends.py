"""Numbers that are added to the results of a product in some rows, before its nonlinearity: the share of adapters."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.addend_layout import up_column

NO_ADDENDS = (0, 0, 0, 0)
_NO_VALUES, _NO_ROWS = torch.empty((0, 0)), torch.empty(0, dtype=torch.int64)


class Addends(NamedTuple):
    """Addends of some rows of a pass. The other rows' results are the same bits as without any."""

    values: Tensor  # float32 [rows with addends, addend_width]
    places: Tensor  # int64 [rows with addends] their rows in the pass, on the device of the values
    of_row: Tensor  # int64 [rows of the pass] which of `values` is a row's own, or -1; on the CPU
    device_adder: Callable[[Tensor], None] | None = None  # adds to a whole product, in place of the tensors

    @classmethod
    def by_device(cls, adder: Callable[[Tensor], None]) -> "Addends":
        """Return addends that a kernel adds to a product [rows, columns], in place."""
        return cls(_NO_VALUES, _NO_ROWS, _NO_ROWS, adder)

    def native_numbers(self, out_width: int) -> tuple[int, int, int, int]:
        """Return what the native products take (kernels/csrc/work.h)."""
        values, of_row = self.values, self.of_row
        assert self.device_adder is None, "addends of a device"
        assert values.dtype == torch.float32, f"not float32: {values.dtype}"
        assert of_row.dtype == torch.int64, f"not int64: {of_row.dtype}"
        assert of_row.is_contiguous(), "rows are one run of memory"
        assert values.stride(1) == 1, "addends of a row are one run of memory"
        return values.data_ptr(), values.stride(0), up_column(out_width), of_row.data_ptr()

    def from_column(self, first: int) -> "Addends":
        """Return the addends of a range of columns, for a product that computes only that range."""
        return self._replace(values=self.values[:, first:])

    def added_to(self, product: Tensor, *, is_gated: bool = False) -> Tensor:
        """Add to product [rows, columns] of any dtype, in place and rounded once, and return it. With gates, `product`
        has those in its first half and the ups in its second."""
        if self.device_adder is not None:
            self.device_adder(product)
            return product
        width = product.shape[1]
        values = self.values[:, :width]
        if is_gated:
            half = width // 2
            values = torch.cat((values[:, :half], self.values[:, up_column(half) : up_column(half) + half]), dim=1)
        sums = product.index_select(0, self.places).float().add_(values)
        return product.index_copy_(0, self.places, sums.to(product.dtype))
