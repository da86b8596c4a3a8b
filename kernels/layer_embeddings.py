"""Layer embeddings (per-layer embeddings, Gemma 3n and 4): a short vector of each token for every layer, and what a
layer adds to the stream by it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.activation import Gated, Norm
from kernels.linear import Projection


class LayerEmbeddings:
    """token_ids [tokens], hidden [tokens, hidden_size], inputs of the first layer -> [tokens, layers, width]."""

    __slots__ = ("_look_up", "_multiplier", "_norm", "_num_layers", "_num_rows", "_product")

    def __init__(
        self, look_up: Callable[[Tensor], Tensor], product: Projection, norm: Norm, *, num_rows: int, num_layers: int
    ) -> None:
        """`look_up` maps [tokens] below `num_rows` to rows [tokens, layers * width] of a table, `product` the stream to
        as many; `norm` is of one vector."""
        self._look_up, self._product, self._norm = look_up, product, norm
        self._num_rows, self._num_layers = num_rows, num_layers
        self._multiplier = math.sqrt(product.out_width // num_layers)

    def __call__(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Compute; tokens without a row have that of token 0."""
        rows = self._look_up(token_ids.where(token_ids < self._num_rows, 0))
        made = self._product(hidden).mul_(hidden.shape[1] ** -0.5)
        width = made.shape[1] // self._num_layers
        made = self._norm(made.view(-1, width)).view(len(made), self._num_layers, width)
        multiplier = torch.tensor(self._multiplier, dtype=rows.dtype).item()  # rounded as the table is
        return made.add_(rows.mul_(multiplier).view_as(made)).mul_(0.5**0.5)


class EmbeddingGate:
    """What a layer adds by its own embeddings of the tokens."""

    __slots__ = ("_gate", "_gated", "_norm", "_output")

    def __init__(self, gate: Projection, output: Projection, norm: Norm, gated: Gated) -> None:
        self._gate, self._output, self._norm, self._gated = gate, output, norm, gated

    def __call__(self, x: Tensor, embeddings: Tensor) -> Tensor:
        """Compute x [rows, hidden_size], embeddings [rows, width] -> [rows, hidden_size]."""
        return self._norm(self._output(self._gated(torch.cat((self._gate(x), embeddings), 1))))


class LayerEnd:
    """What becomes of the residual stream behind a layer."""

    __slots__ = ("_gate", "_scale")

    def __init__(self, gate: EmbeddingGate | None, scale: Tensor | None) -> None:
        """`scale` [1]: by which the stream is multiplied; None: by nothing."""
        self._gate, self._scale = gate, scale

    def addend(self, x: Tensor, embeddings: Tensor | None) -> Tensor:
        """Return what the layer adds by its embeddings [rows, width] and by x [rows, hidden_size]."""
        assert self._gate is not None, "a layer without embeddings"
        assert embeddings is not None, "a layer without embeddings"
        return self._gate(x, embeddings)

    def __call__(self, hidden: Tensor, embeddings: Tensor | None) -> Tensor:
        """Change hidden [rows, hidden_size] in place and return it; `embeddings` [rows, width], if it has a gate."""
        if self._gate is not None:
            hidden.add_(self.addend(hidden, embeddings))
        return hidden if self._scale is None else hidden.mul_(self._scale)
