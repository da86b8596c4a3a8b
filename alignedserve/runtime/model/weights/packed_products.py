"""Products with weights that stay packed as their file has them, for modules that read the same input."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.activation import Gated
from kernels.addends import Addends
from kernels.cpu.block_quantized_linear import BlockQuantizedLinear, JoinedLinear
from kernels.cpu.packed_linear import Int8Linear
from kernels.float8_linear import Float8Linear
from kernels.grouped_linear import GroupedLinear, GroupedWeight, Numbers, joined_weights
from kernels.linear import AdaptableProjection, Linear

BLOCK_DTYPES = (torch.float32, torch.bfloat16)  # of inputs and results

RowChange = Callable[[Tensor], Tensor]  # of the order of rows


class BlockRows(NamedTuple):
    """The weight of one module in blocks."""

    rows: Tensor  # uint8 [rows, bytes of a row]
    type_name: str
    in_width: int
    order: Tensor | None = None  # of inputs: int64 [in_width]; None: as they come

    def changed(self, change: RowChange) -> "BlockRows":
        return self._replace(rows=change(self.rows))


class Int8Rows(NamedTuple):
    """The weight of one module with 8 bits."""

    rows: Tensor  # int8 [rows, in_width]
    scales: Tensor  # float32 [rows]

    def changed(self, change: RowChange) -> "Int8Rows":
        return Int8Rows(change(self.rows), change(self.scales))


class Float8Rows(NamedTuple):
    """The weight of one module in FP8."""

    rows: Tensor  # float8_e4m3fn [rows, in_width]
    scales: Tensor  # float32 [rows]

    def changed(self, change: RowChange) -> "Float8Rows":
        return Float8Rows(change(self.rows.view(torch.uint8)).view(self.rows.dtype), change(self.scales))

    def moved(self, device: torch.device) -> "Float8Rows":
        return Float8Rows(self.rows.to(device), self.scales.to(device))


class GroupedRows(NamedTuple):
    """The weight of one module with 4 or 8 bits in groups."""

    weight: GroupedWeight
    order: Tensor | None = None  # of inputs: int64 [in_width]; None: as they come

    @property
    def rows(self) -> Tensor:
        """Return the numbers: uint8 [rows, bytes of a row]."""
        return self.weight.words

    @property
    def kind(self) -> tuple[Numbers, int, bool]:
        """Return the form of numbers, the inputs of a group, and whether it has a minimum: alike where products are
        joined."""
        return self.weight.numbers, self.weight.group, self.weight.minima is not None

    def changed(self, change: RowChange) -> "GroupedRows":
        return self._replace(weight=self.weight.changed(change))

    def moved(self, device: torch.device) -> "GroupedRows":
        order = None if self.order is None else self.order.to(device)
        return GroupedRows(self.weight.changed(lambda part: part.to(device)), order)


class PlainRows(NamedTuple):
    """The weight of one module in the dtype of the model."""

    rows: Tensor  # [rows, in_width]

    def changed(self, change: RowChange) -> "PlainRows":
        return PlainRows(change(self.rows))


Rows = BlockRows | Int8Rows | Float8Rows | GroupedRows | PlainRows


class _Then(NamedTuple):
    dtype: torch.dtype
    activation: str | None
    is_gated: bool
    has_few_rows: bool = False


def packed_product(
    parts: Sequence[Rows],
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: str | None,
    is_gated: bool,
    *,
    has_few_rows: bool = False,
) -> AdaptableProjection:
    """Return the product with the stacked weights, then the nonlinearity. `has_few_rows`: no weight is ever
    unpacked."""
    if are_alike(parts):
        return _single(_stacked(parts), bias, _Then(dtype, activation, is_gated, has_few_rows))
    sizes = [len(part.rows) for part in parts]
    biases = [None] * len(parts) if bias is None else torch.split(bias, sizes)
    plain = _Then(dtype, None, False)
    products = [_single(part, part_bias, plain) for part, part_bias in zip(parts, biases, strict=True)]
    blocks = [product for product in products if isinstance(product, BlockQuantizedLinear)]
    joined = JoinedLinear(blocks) if len(blocks) == len(products) else _SideBySide(products)
    if activation is None:
        return joined
    assert is_gated, "one module has weights of one kind"
    return _GatedProduct(joined, activation, dtype, parts[0].rows.device)


def are_alike(parts: Sequence[Rows]) -> bool:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        return False
    if isinstance(first, GroupedRows):
        grouped = [part for part in parts if isinstance(part, GroupedRows)]
        return all(part.kind == first.kind and _same(part.order, first.order) for part in grouped)
    if not isinstance(first, BlockRows):
        return True
    blocks = [part for part in parts if isinstance(part, BlockRows)]
    return all(part.type_name == first.type_name and _same(part.order, first.order) for part in blocks)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _stacked(parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if isinstance(first, BlockRows):
        return first._replace(rows=torch.cat([part.rows for part in parts]))
    if isinstance(first, PlainRows):
        return PlainRows(torch.cat([part.rows for part in parts]))
    if isinstance(first, GroupedRows):
        grouped = [part.weight for part in parts if isinstance(part, GroupedRows)]
        return first._replace(weight=joined_weights(grouped))
    scales = torch.cat([part.scales for part in parts if isinstance(part, (Int8Rows, Float8Rows))])
    if isinstance(first, Int8Rows):
        return Int8Rows(torch.cat([part.rows for part in parts]), scales)
    raw = torch.cat([part.rows.view(torch.uint8) for part in parts])
    return Float8Rows(raw.view(first.rows.dtype), scales)


def _single(part: Rows, bias: Tensor | None, then: _Then) -> AdaptableProjection:
    form: dict[str, Any] = {"activation": then.activation, "is_gated": then.is_gated}
    if isinstance(part, PlainRows):
        return Linear(part.rows, bias, **form)
    form["dtype"] = then.dtype
    if isinstance(part, Int8Rows):
        return Int8Linear(part.rows, bias, scales=part.scales, **form)
    if isinstance(part, Float8Rows):
        return Float8Linear(part.rows, part.scales, bias, **form)
    product: AdaptableProjection
    if isinstance(part, GroupedRows):
        product = GroupedLinear(part.weight, bias, has_few_rows=then.has_few_rows, **form)
    else:
        product = BlockQuantizedLinear(part.rows, part.type_name, part.in_width, bias, **form)
    return product if part.order is None else _ReorderedInputs(product, part.order)


class _ReorderedInputs:
    __slots__ = ("_order", "_product", "in_width", "out_width")

    def __init__(self, product: AdaptableProjection, order: Tensor) -> None:
        self._product, self._order = product, order
        self.in_width, self.out_width = product.in_width, product.out_width

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        return self._product(x.index_select(1, self._order), addends)


class _SideBySide:
    __slots__ = ("_products", "in_width", "out_width")

    def __init__(self, products: Sequence[AdaptableProjection]) -> None:
        self._products = products
        self.in_width, self.out_width = products[0].in_width, sum(product.out_width for product in products)

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        product = torch.cat([product(x) for product in self._products], dim=1)
        return product if addends is None else addends.added_to(product)


class _GatedProduct:
    __slots__ = ("_gated", "_product", "in_width", "out_width")

    def __init__(self, product: AdaptableProjection, activation: str, dtype: torch.dtype, device: torch.device) -> None:
        self._product = product
        self._gated = Gated(activation, dtype, device)
        self.in_width, self.out_width = product.in_width, product.out_width // 2

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        product = self._product(x)
        if addends is not None:
            product = addends.added_to(product, is_gated=True)
        return self._gated(product)
