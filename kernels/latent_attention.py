"""Products around latent attention (DeepSeek-V2, 2.1), as attention over one key head of short rows has them.

Of a head, key = made(latent), value = also_made(latent), both products with a matrix. So the score of a query is
query @ made.T @ latent, and the sum of values is also_made(sum of latents): queries and sums are multiplied, a token's
latent never. Every head's product is one of its own: results of a row do not depend on what shares its batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.addends import Addends
from kernels.linear import Projection
from kernels.norm import Norm


class LatentQueries:
    """x [rows, in_width] -> the queries of all heads and the row to be cached [rows, (heads + 1) * row_width].

    In each: first the elements that are to be rotated, then those that meet the latents, or the latent.
    """

    __slots__ = ("_absorbing", "_norm", "_queries", "_rope_dim", "_row", "in_width", "out_width")

    def __init__(
        self, queries: Sequence[Projection | Norm], row: Projection, norm: Norm, absorbing: Sequence[Projection]
    ) -> None:
        """`queries`: one after another, to [heads * (rope_dim + nope_dim)]. `row`: to [rope_dim + rank], the latent,
        which `norm` normalises, last. `absorbing`: of each head, nope_dim -> rank."""
        self._queries, self._row, self._norm, self._absorbing = queries, row, norm, absorbing
        self._rope_dim = row.out_width - absorbing[0].out_width
        self.in_width, self.out_width = row.in_width, (len(absorbing) + 1) * row.out_width

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        assert addends is None, "latent attention has no adapters"
        num_rows, num_heads, rope = len(x), len(self._absorbing), self._rope_dim
        row, queries = self._row(x), x
        for product in self._queries:
            queries = product(queries)
        heads = queries.view(num_rows, num_heads, -1)
        out = torch.empty((num_rows, num_heads + 1, row.shape[1]), dtype=x.dtype, device=x.device)
        out[:, :num_heads, :rope] = heads[:, :, :rope]
        out[:, num_heads, :rope] = row[:, :rope]
        out[:, num_heads, rope:] = self._norm(row[:, rope:])
        for head, absorb in enumerate(self._absorbing):
            out[:, head, rope:] = absorb(heads[:, head, rope:])
        return out.view(num_rows, -1)


class LatentOutput:
    """Sums of cached rows of all heads [rows, heads * row_width] -> [rows, out_width]."""

    __slots__ = ("_output", "_rank", "_values", "in_width", "out_width")

    def __init__(self, values: Sequence[Projection], output: Projection, row_width: int) -> None:
        """`values`: of each head, rank -> value_dim. `output`: of all heads' values."""
        self._values, self._output, self._rank = values, output, values[0].in_width
        self.in_width, self.out_width = len(values) * row_width, output.out_width

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        assert addends is None, "latent attention has no adapters"
        sums = x.view(len(x), len(self._values), -1)[:, :, -self._rank :]
        return self._output(torch.cat([value(sums[:, head]) for head, value in enumerate(self._values)], dim=1))
