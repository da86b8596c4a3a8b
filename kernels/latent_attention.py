"""Products around latent attention (DeepSeek-V2, 2.1), as attention over one key head of short rows has them.

Of a head, key = made(latent), value = also_made(latent), both products with a matrix. So the score of a query is
query @ made.T @ latent, and the sum of values is also_made(sum of latents): queries and sums are multiplied, a token's
latent never. Every head's product is one of its own: results of a row do not depend on what shares its batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.activation import Norm
from kernels.addends import Addends
from kernels.linear import Linear, Projection


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
