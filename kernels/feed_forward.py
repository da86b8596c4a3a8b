"""Feed-forward parts of a layer: two products for all tokens, or experts, of which each token passes a few.

With experts, rows are sorted by expert, so that every expert's weights are read once and multiplied by all its rows; on
a GPU by the device itself (`kernels.grouped_linear`).

A feed-forward part whose gates count from a cutoff on: that of a share of them if they were normally distributed.

Layer embeddings (per-layer embeddings, Gemma 3n and 4): a short vector of each token for every layer, and what a
layer adds to the stream by it.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from kernels.activation import Gated, Norm
from kernels.addend_layout import LayerProduct
from kernels.cpu.expert_products import ExpertProducts, native_experts
from kernels.gpu_dispatch import fused_kernels
from kernels.linear import AdaptableProjection, Linear, Projection
from kernels.lora import LayerAdapters

# On a CPU so many rows are computed at a time: intermediate results then stay in the cache, and in memory that was used
# before. 2048 rows of 896 x 4864 in float32: 575 ms at once, 498 ms in four parts.
_TILE_ROWS = 512


class FeedForwardPart:
    """x [rows, hidden_size] -> down(gate_up(x)), the nonlinearity and gates applied by the first product."""

    __slots__ = ("down", "gate_up", "in_width", "out_width")

    def __init__(self, gate_up: AdaptableProjection, down: AdaptableProjection) -> None:
        self.gate_up = gate_up
        self.down = down
        self.in_width, self.out_width = gate_up.in_width, down.out_width

    @property
    def products(self) -> tuple[Projection, ...]:
        """Return the products that every row passes, in order."""
        return self.gate_up, self.down

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        num_tiles = -(-x.shape[0] // _TILE_ROWS) if x.device.type == "cpu" else 1
        if num_tiles == 1:
            return self.down(self.gate_up(x))
        return torch.cat([self.down(self.gate_up(tile)) for tile in x.chunk(num_tiles)])

    def adapted(self, x: Tensor, adapters: LayerAdapters) -> Tensor:
        """Compute the same with what adapters add to both products."""
        num_tiles = -(-x.shape[0] // _TILE_ROWS) if x.device.type == "cpu" else 1
        if num_tiles == 1:
            return self._adapted(x, adapters)
        results, first = [], 0
        for tile in x.chunk(num_tiles):
            part = adapters.part(first, first + len(tile))
            results.append(self(tile) if part is None else self._adapted(tile, part))
            first += len(tile)
        return torch.cat(results)

    def _adapted(self, x: Tensor, adapters: LayerAdapters) -> Tensor:
        inner = adapters.product(LayerProduct.GATE_UP, self.gate_up, x)
        return adapters.product(LayerProduct.DOWN, self.down, inner)


class Routing(NamedTuple):
    """The experts of some rows."""

    experts: Tensor  # [rows, chosen] integers, different in a row
    shares: Tensor  # [rows, chosen] float32


class Router(Protocol):
    """Chooses the experts of each row."""

    num_experts: int

    def __call__(self, x: Tensor) -> Routing:
        """Choose for x [rows, hidden_size]."""


class ExpertRouter:
    """Chooses the experts of each row by the softmax of a product, in float32."""

    __slots__ = ("_kernels", "_normalises", "_num_chosen", "_product", "num_experts")

    def __init__(self, weight: Tensor, num_chosen: int, *, normalises: bool, bias: Tensor | None = None) -> None:
        """`weight` [experts, hidden_size], `bias` [experts]; `normalises`: a row's shares add up to 1."""
        self.num_experts = weight.shape[0]
        self._product = Linear(weight.float(), None if bias is None else bias.float())
        self._num_chosen = num_chosen
        self._normalises = normalises
        self._kernels: Any | None = fused_kernels("expert_rows", weight.device, weight.dtype)

    def __call__(self, x: Tensor) -> Routing:
        """Choose for x [rows, hidden_size]."""
        logits = self._product(x.float())
        if self._kernels is not None:
            return Routing(*self._kernels.choose(logits, self._num_chosen, normalises=self._normalises))
        probabilities = torch.softmax(logits, dim=-1)
        shares, experts = probabilities.topk(self._num_chosen, dim=-1)
        return Routing(experts, shares / shares.sum(-1, keepdim=True) if self._normalises else shares)


class ScaledRouter:
    """Chooses as ExpertRouter does, of inputs that are normalised and scaled; each expert has a factor of its own."""

    __slots__ = ("_choose", "_factors", "_norm", "_scale", "num_experts")

    def __init__(self, norm: Norm, scale: Tensor, choose: ExpertRouter, factors: Tensor) -> None:
        """`scale` [hidden_size]; `factors` [experts] float32: of shares, which add up to 1 before."""
        self._norm, self._scale, self._choose, self._factors = norm, scale, choose, factors
        self.num_experts = choose.num_experts

    def __call__(self, x: Tensor) -> Routing:
        """Choose for x [rows, hidden_size]."""
        routing = self._choose((self._norm(x) * self._scale).mul_(x.shape[1] ** -0.5))
        return Routing(routing.experts, routing.shares * self._factors[routing.experts])


class GroupRouter:
    """Chooses by sigmoids: first groups of experts by their two best, then experts in these (DeepSeek-V3, 2.1.2). A
    learned number is added to an expert's score for the choice alone; it evens out how often experts are chosen.
    Without these numbers, scores are a softmax, and groups are chosen by their best expert (DeepSeek-V2, 2.2.2)."""

    __slots__ = ("_correction", "_normalises", "_num_chosen", "_num_chosen_groups", "_num_groups", "_product", "_scale",
                 "num_experts")  # fmt: skip

    def __init__(
        self,
        weight: Tensor,
        correction: Tensor | None,
        num_chosen: int,
        *,
        normalises: bool,
        scale: float = 1.0,
        groups: tuple[int, int] = (1, 1),
    ) -> None:
        """`weight` [experts, hidden_size], `correction` [experts] float32; `normalises`: the shares of a row's experts
        add up to `scale`; `groups`: how many there are, and from how many a row's experts come."""
        self.num_experts = weight.shape[0]
        self._product = Linear(weight.float())
        self._correction, self._num_chosen = correction, num_chosen
        self._normalises, self._scale = normalises, scale
        self._num_groups, self._num_chosen_groups = groups

    def __call__(self, x: Tensor) -> Routing:
        """Choose for x [rows, hidden_size]."""
        logits = self._product(x.float())
        scores = logits.softmax(-1) if self._correction is None else _sigmoids(logits)
        ranks = scores if self._correction is None else scores + self._correction
        if self._num_groups > 1:
            by_group = ranks.view(len(ranks), self._num_groups, -1)
            best = by_group.topk(1 if self._correction is None else 2, dim=-1).values.sum(-1)
            chosen = best.topk(self._num_chosen_groups, dim=-1).indices
            others = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
            ranks = by_group.masked_fill(others[..., None], -torch.inf).view_as(ranks)
        experts = ranks.topk(self._num_chosen, dim=-1).indices
        shares = scores.gather(1, experts)
        if self._normalises:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, shares * self._scale)


def _sigmoids(x: Tensor) -> Tensor:
    return x.double().sigmoid_().to(x.dtype)


def grouped_products(
    x: Tensor,
    experts: Tensor,
    products: Sequence[Callable[[Tensor], Tensor]],
    shares: Tensor | None = None,
    native: ExpertProducts | None = None,
) -> Tensor:
    """Multiply each row with the products of its experts, all rows of an expert at once.

    x         [rows, in_width], rows >= 1
    experts   [rows, chosen] int64: indices of `products`, which map [n, in_width] to [n, out_width]
    shares    [rows, chosen]: what rows are multiplied by before; None: nothing
    native    all products in one call, for where experts have few rows
    returns   [rows, chosen, out_width]"""
    order, counts, rows = _by_expert(x, experts, len(products), shares)
    results = multiplied_by_expert(rows, counts, products, native)
    return _in_order(results, order, experts)


def multiplied_by_expert(
    rows: Tensor,
    counts: Sequence[int],
    products: Sequence[Callable[[Tensor], Tensor]],
    native: ExpertProducts | None = None,
) -> Tensor:
    """Multiply rows [n, in_width], n >= 1, of each expert so many, one expert's behind another's -> [n, out_width]."""
    if native is not None and max(counts) <= _TILE_ROWS:
        return native(rows, counts)
    groups = zip(products, counts, accumulate(counts), strict=True)
    return torch.cat([product(rows[end - count : end]) for product, count, end in groups if count])


def _by_expert(x: Tensor, experts: Tensor, num_experts: int, shares: Tensor | None) -> tuple[Tensor, list[int], Tensor]:
    order = experts.flatten().argsort(stable=True)
    counts: list[int] = torch.bincount(experts.flatten(), minlength=num_experts).tolist()
    rows = x.index_select(0, order // experts.shape[1])
    if shares is not None:
        rows.mul_(shares.flatten()[order][:, None].to(x.dtype))
    return order, counts, rows


def _in_order(results: Tensor, order: Tensor, experts: Tensor) -> Tensor:
    return torch.empty_like(results).index_copy_(0, order, results).view(*experts.shape, -1)


class Experts:
    """x [rows, hidden_size] -> the sum of the chosen experts' results, each times its share; see `Router`."""

    __slots__ = ("_experts", "_native", "_scales_inputs", "in_width", "out_width", "router")

    def __init__(self, router: Router, experts: Sequence[Projection], *, scales_inputs: bool = False) -> None:
        """`experts`: one for each row of the router's weight, all of the same widths. `scales_inputs`: shares multiply
        what they read."""
        self._scales_inputs = scales_inputs
        self.router = router
        self._experts = experts
        self.in_width, self.out_width = experts[0].in_width, experts[0].out_width
        self._native = native_experts(experts, self.in_width, self.out_width)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        return self.routed(x, self.router(x))

    def routed(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute the same with experts that are chosen already."""
        results = self._results(x, routing.experts, routing.shares if self._scales_inputs else None)
        return results.sum(1) if self._scales_inputs else weighted(results, routing.shares)

    def _results(self, x: Tensor, experts: Tensor, shares: Tensor | None) -> Tensor:
        return grouped_products(x, experts, self._experts, shares, self._native)


class ExpertsElsewhere(Protocol):
    """Experts of a layer that another process has."""

    num_experts: int

    def begin(self, rows: Tensor, counts: Sequence[int]) -> None:
        """Begin to multiply rows [n, width], of each expert so many, one expert's behind another's."""

    def results(self) -> Tensor:
        """Return the results of what was begun last [n, width]."""


class DividedExperts(Experts):
    """As `Experts`, to the last bit; some of which are elsewhere, and compute beside those here."""

    __slots__ = ("_elsewhere",)

    def __init__(
        self,
        router: Router,
        experts: Sequence[Projection],
        elsewhere: Sequence[ExpertsElsewhere],
        *,
        scales_inputs: bool = False,
    ) -> None:
        """`experts`: the first ones; those `elsewhere` follow."""
        super().__init__(router, experts, scales_inputs=scales_inputs)
        self._elsewhere = elsewhere

    @override
    def _results(self, x: Tensor, experts: Tensor, shares: Tensor | None) -> Tensor:
        order, counts, rows = _by_expert(x, experts, self.router.num_experts, shares)
        ends, first = [0, *accumulate(counts)], len(self._experts)
        begun, own_counts, num_own = list[ExpertsElsewhere](), counts[:first], ends[first]
        for part in self._elsewhere:
            last = first + part.num_experts
            if ends[last] > ends[first]:
                part.begin(rows[ends[first] : ends[last]], counts[first:last])
                begun.append(part)
            first = last
        outputs = [multiplied_by_expert(rows[:num_own], own_counts, self._experts, self._native)] if num_own else []
        return _in_order(torch.cat([*outputs, *(part.results() for part in begun)]), order, experts)


class WithSharedExpert:
    """x [rows, hidden_size] -> what the chosen experts give and, beside them, the one that every row passes."""

    __slots__ = ("_chosen", "_gate", "_shared", "in_width", "out_width")

    def __init__(self, chosen: Projection, shared: Projection, gate: Projection | None = None) -> None:
        """`gate`: to one column, whose sigmoid is the share of the shared expert; None: it is 1."""
        self._chosen, self._shared, self._gate = chosen, shared, gate
        self.in_width, self.out_width = chosen.in_width, chosen.out_width

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        shared = self._shared(x)
        if self._gate is not None:
            shared = shared * _sigmoids(self._gate(x))
        return self._chosen(x).add_(shared)


class RoutedExperts(Protocol):
    """A mixture whose experts may be chosen by other rows than they compute."""

    @property
    def router(self) -> Router:
        """Return what chooses them."""

    def routed(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute x [rows, in_width] by these experts -> [rows, out_width]."""


class ExpertsBeside:
    """What experts add to a feed-forward part beside them, each with norms of its own."""

    __slots__ = ("_dense_norm", "_experts", "_norms")

    def __init__(self, dense_norm: Norm, experts: RoutedExperts, norms: tuple[Norm, Norm]) -> None:
        """`norms`: before and behind the experts; their router reads the residual stream as it is."""
        self._dense_norm, self._experts, self._norms = dense_norm, experts, norms

    def __call__(self, dense: Tensor, residual: Tensor) -> Tensor:
        """Return the sum [rows, hidden_size] of both, of what the feed-forward part gave, and of the stream."""
        before, behind = self._norms
        chosen = self._experts.routed(before(residual), self._experts.router(residual))
        return self._dense_norm(dense).add_(behind(chosen))


def weighted(results: Tensor, shares: Tensor) -> Tensor:
    """Add up results [rows, chosen, width], which may be overwritten, times shares [rows, chosen] -> [rows, width]."""
    # Of one dtype: PyTorch multiplies a bfloat16 in place by a float32 a hundred times as slowly.
    return results.mul_(shares[..., None].to(results.dtype)).sum(1)


class SparseFeedForward:
    """x [rows, hidden_size] -> down(activation(relu(gate - cutoff)) * up)."""

    __slots__ = ("_deviations", "_gated", "down", "gate_up", "in_width", "out_width")

    def __init__(self, gate_up: Projection, down: Projection, gated: Gated, sparsity: float) -> None:
        """`gate_up` makes both, gates first, without a nonlinearity; `sparsity`: the share, in (0, 1)."""
        self.gate_up, self.down, self._gated = gate_up, down, gated
        self.in_width, self.out_width = gate_up.in_width, down.out_width
        self._deviations = torch.erfinv(2 * torch.tensor(sparsity) - 1).mul_(math.sqrt(2.0)).to(gated.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        return torch.cat([self._part(rows) for rows in torch.split(x, _TILE_ROWS)])

    def _part(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        gates = both[:, : both.shape[1] // 2]
        exact = gates.double()  # so that sums do not depend on the order of their terms
        mean = exact.mean(1, keepdim=True)
        deviation = exact.sub_(mean).square_().mean(1, keepdim=True).sqrt_()
        gates.sub_(mean.to(x.dtype) + deviation.to(x.dtype) * self._deviations).relu_()
        return self.down(self._gated(both))


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
