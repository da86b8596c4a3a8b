"""Matrix products with a fixed weight, packed once for the machine where that pays.

Three ways, the first that is here: the native kernels (`kernels.cpu.packed_linear`), oneDNN's packed layout, and plain
PyTorch. None needs more memory than the plain weight. A nonlinearity that follows is applied while the product is in
registers where a packed one computes it.

Products that read and give numbers in ranges of their own, as some encoders of pictures were trained.

Products around latent attention (DeepSeek-V2, 2.1), as attention over one key head of short rows has them.

Of a head, key = made(latent), value = also_made(latent), both products with a matrix. So the score of a query is
query @ made.T @ latent, and the sum of values is also_made(sum of latents): queries and sums are multiplied, a token's
latent never. Every head's product is one of its own: results of a row do not depend on what shares its batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from kernels.activation import ACTIVATIONS, Gated, Norm
from kernels.addends import Addends
from kernels.cpu.packed_linear import PackedLinear, fits, packed_levels

# oneDNN chooses a layout for an expected number of rows; this one measured well from 1 to 2048 rows.
_PACKING_ROWS = 64

ONEDNN = "onednn"


class _PostOp(NamedTuple):
    name: str
    algorithm: str


_POST_OPS = {
    None: _PostOp("none", ""),
    "relu": _PostOp("relu", ""),
    "silu": _PostOp("swish", ""),
    "gelu": _PostOp("gelu", "none"),
    "gelu_tanh": _PostOp("gelu", "tanh"),
}


class Projection(Protocol):
    """A product x [rows, in_width] -> [rows, out_width], whatever its weight's form: `Linear`, `Int8Linear`, ..."""

    in_width: int
    out_width: int

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [rows, in_width], rows >= 1, unchanged -> [rows, out_width]."""


class AdaptableProjection(Projection, Protocol):
    """A product to whose results adapters may add, before its nonlinearity."""

    @override
    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor: ...


class Linear:
    """x [rows, in_width] -> activation(x @ weight.T + bias) [rows, out_width], dtype and device of the weight. With
    gates: activation(gate) * up, of a weight whose first half makes the gates."""

    __slots__ = ("_multiply", "in_width", "out_width")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        is_gated: bool = False,
        allow_packing: bool = True,
    ) -> None:
        """`weight` [columns, in_width]; `bias` [columns]; `activation` a name in ACTIVATIONS, or of gates, which need
        one, clamped_silu. Keeps no reference to a weight that it packed."""
        columns, self.in_width = weight.shape
        self.out_width = columns // 2 if is_gated else columns
        levels = (
            packed_levels(weight.dtype, weight.device) if allow_packing and fits(weight.dtype, self.in_width) else ()
        )
        self._multiply: PackedLinear | OneDnnLinear | _PlainLinear | _Gates
        if levels:
            self._multiply = PackedLinear(
                weight, bias, level=levels[0], element=weight.dtype, activation=activation, is_gated=is_gated
            )
        elif is_gated:
            assert activation is not None, "gates without a nonlinearity"
            self._multiply = _Gates(_product(weight, bias, None, allow_packing), activation, weight)
        else:
            self._multiply = _product(weight, bias, activation, allow_packing)

    @property
    def native_parts(self) -> tuple[Any, ...]:
        """Return the native product, see `kernels.cpu.decode_pass`; none where there is none."""
        return self._multiply.native_parts if isinstance(self._multiply, PackedLinear) else ()

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Multiply x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        return self._multiply(x, addends)


def packing(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the packing of weights of this dtype here: a level of the native kernels, ONEDNN, or none."""
    levels = packed_levels(dtype, device)
    if levels:
        return levels[0]
    return ONEDNN if _has_onednn(dtype, device) else None


def _has_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _product(
    weight: Tensor, bias: Tensor | None, activation: str | None, allow_packing: bool
) -> "OneDnnLinear | _PlainLinear":
    if allow_packing and _has_onednn(weight.dtype, weight.device):
        return OneDnnLinear(weight, bias, activation)
    return _PlainLinear(weight, bias, activation)


class OneDnnLinear:
    """Product in oneDNN's packed layout; otherwise as `Linear` without gates. Keeps no reference to the weight."""

    __slots__ = ("_activation", "_bias", "_is_whole", "_post_op", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKING_ROWS)
        self._bias = bias
        self._post_op = _POST_OPS.get(activation, _POST_OPS[None])
        self._activation = None if activation is None else ACTIVATIONS[activation]
        self._is_whole = activation in _POST_OPS  # else the library knows no such nonlinearity

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Multiply x [rows, in_width] -> [rows, out_width]."""
        name, algorithm = self._post_op
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, name, [], algorithm)
        if self._activation is not None and not self._is_whole:
            return self._activation(product if addends is None else addends.added_to(product))
        if addends is None:
            return product
        # The rows with addends once more, as the library applies the nonlinearity to all.
        plain: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        tensor = addends.added_to(plain).index_select(0, addends.places)
        return product.index_copy_(0, addends.places, tensor if self._activation is None else self._activation(tensor))


class _PlainLinear:
    __slots__ = ("_activation", "_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
        self._weight = weight
        self._bias = bias
        self._activation = None if activation is None else ACTIVATIONS[activation]

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        product = functional.linear(x, self._weight, self._bias)
        if addends is not None:
            product = addends.added_to(product)
        return product if self._activation is None else self._activation(product)


class _Gates:
    __slots__ = ("_gated", "_product")

    def __init__(self, product: "OneDnnLinear | _PlainLinear", activation: str, weight: Tensor) -> None:
        self._product = product
        self._gated = Gated(activation, weight.dtype, weight.device)

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        product = self._product(x)
        if addends is not None:
            product = addends.added_to(product, is_gated=True)
        return self._gated(product)


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


class HeadProducts:
    """Products of each head with a matrix of its own."""

    __slots__ = ("_products", "_weights", "in_width", "num_heads", "out_width")

    def __init__(self, weights: Tensor) -> None:
        """`weights` [heads, out_width, in_width]: kept."""
        self.num_heads, self.out_width, self.in_width = weights.shape
        # On a CPU a product of its own for each head, whose rows do not depend on how many there are.
        self._weights = None if weights.device.type == "cpu" else weights.mT.contiguous()
        self._products = [Linear(weight.contiguous()) for weight in weights] if self._weights is None else []

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the products of x [rows, heads, in_width] into out [rows, heads, out_width], both possibly strided."""
        if self._weights is not None:
            out.copy_(torch.bmm(x.transpose(0, 1), self._weights).transpose(0, 1))
            return
        for head, product in enumerate(self._products):
            out[:, head] = product(x[:, head])


class LatentQueries:
    """x [rows, in_width] -> the queries of all heads and the row to be cached [rows, (heads + 1) * row_width]. In each:
    first the elements that are to be rotated, then those that meet the latents, or the latent."""

    __slots__ = ("_absorbing", "_norm", "_queries", "_rope_dim", "_row", "in_width", "out_width")

    def __init__(
        self, queries: Sequence[Projection | Norm], row: Projection, norm: Norm, absorbing: HeadProducts
    ) -> None:
        """`queries`: one after another, to [heads * (rope_dim + nope_dim)]. `row`: to [rope_dim + rank], the latent,
        which `norm` normalises, last. `absorbing`: of each head, nope_dim -> rank."""
        self._queries, self._row, self._norm, self._absorbing = queries, row, norm, absorbing
        self._rope_dim = row.out_width - absorbing.out_width
        self.in_width, self.out_width = row.in_width, (absorbing.num_heads + 1) * row.out_width

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        assert addends is None, "latent attention has no adapters"
        num_rows, num_heads, rope = len(x), self._absorbing.num_heads, self._rope_dim
        row, queries = self._row(x), x
        for product in self._queries:
            queries = product(queries)
        heads = queries.view(num_rows, num_heads, -1)
        out = torch.empty((num_rows, num_heads + 1, row.shape[1]), dtype=x.dtype, device=x.device)
        out[:, :num_heads, :rope] = heads[:, :, :rope]
        out[:, num_heads, :rope] = row[:, :rope]
        out[:, num_heads, rope:] = self._norm(row[:, rope:])
        self._absorbing.write(heads[:, :, rope:], out[:, :num_heads, rope:])
        return out.view(num_rows, -1)


class LatentOutput:
    """Sums of cached rows of all heads [rows, heads * row_width] -> [rows, out_width]."""

    __slots__ = ("_output", "_rank", "_values", "in_width", "out_width")

    def __init__(self, values: HeadProducts, output: Projection, row_width: int) -> None:
        """`values`: of each head, rank -> value_dim. `output`: of all heads' values."""
        self._values, self._output, self._rank = values, output, values.in_width
        self.in_width, self.out_width = values.num_heads * row_width, output.out_width

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        assert addends is None, "latent attention has no adapters"
        sums = x.view(len(x), self._values.num_heads, -1)[:, :, -self._rank :]
        values = torch.empty((*sums.shape[:2], self._values.out_width), dtype=x.dtype, device=x.device)
        self._values.write(sums, values)
        return self._output(values.flatten(1))
