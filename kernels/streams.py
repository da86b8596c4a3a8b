"""Several residual streams, of which each layer computes one and predicts and corrects the others (AltUp, Baykal et
al., NeurIPS 2023), and the short product beside its attention (LAuReL), as Gemma 3n has them.

Streams are [rows, streams, hidden_size]; layers compute stream 0. All sums are of a few terms, one after another, so
that a row's result does not depend on the rows beside it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.activation import Norm
from kernels.linear import Linear, Projection

_TILE_NUMBERS = 1 << 17
_LEAST = 1e-5  # of the mean square of a stream that is brought to another's size


class Laurel(NamedTuple):
    """x [rows, hidden_size] -> x + norm(right(left(x)))."""

    left: Projection
    right: Projection
    norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(self.right(self.left(x))).add_(x)


class StreamMix:
    """What a layer makes of the streams around its own part."""

    __slots__ = ("_corrections", "_norm", "_num_streams", "_predictions", "_router", "_scale", "laurel")

    def __init__(
        self,
        router: tuple[Norm, Tensor],
        predictions: Tensor,
        corrections: Tensor,
        scale: Tensor | None,
        laurel: Laurel,
    ) -> None:
        """`router`: a norm, and a weight [streams, hidden_size]; `predictions` [streams ** 2, streams], `corrections`
        [streams, streams]: weights of what the router gives; `scale` [hidden_size]: of the corrected stream 0, where
        something else is made of it."""
        self._norm, weight = router
        self._router = Linear(weight.float())
        self._num_streams = len(weight)
        self._predictions, self._corrections = predictions.float(), corrections.float()
        self._scale, self.laurel = scale, laurel

    def predicted(self, streams: Tensor) -> Tensor:
        """Return what the streams may be behind the layer."""
        count = self._num_streams
        factors = _weighted(self._shares(streams[:, 0].contiguous()), self._predictions).view(-1, count, count, 1)

        def predict(part: slice) -> Tensor:
            values, shares = streams[part].float(), factors[part]
            total = values[:, None, 0] * shares[:, :, 0]
            for other in range(1, count):
                total.add_(values[:, None, other] * shares[:, :, other])
            return total.add_(values)

        return _by_tiles(predict, streams)

    def corrected(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """Return the streams, by what the layer has made of the first one [rows, hidden_size]."""
        factors = _weighted(self._shares(computed), self._corrections).add_(1.0)

        def correct(part: slice) -> Tensor:
            stream = predicted[part].float()
            missed = computed[part].float() - stream[:, 0]
            return (missed[:, None] * factors[part, :, None]).add_(stream)

        return _by_tiles(correct, predicted)

    def scaled(self, corrected: Tensor) -> Tensor:
        """Return the corrected stream 0 as the layer's inputs are multiplied with it."""
        first = corrected[:, 0]
        return first.contiguous() if self._scale is None else first * self._scale

    def _shares(self, x: Tensor) -> Tensor:
        routed = self._router(self._norm(x).float().mul_(1.0 / x.shape[1]))
        # By float64: PyTorch's function of float32 depends in the last bit on where in a tensor an element stands.
        return routed.double().tanh_().float()


class StreamEnds:
    """Makes the streams of the embeddings, and one hidden state of them in the end."""

    __slots__ = ("_narrowing", "_widening")

    def __init__(self, widening: Sequence[Projection], narrowing: Sequence[Projection]) -> None:
        """Square products, one for each of the streams 1, 2, …."""
        self._widening, self._narrowing = widening, narrowing

    def widened(self, hidden: Tensor) -> Tensor:
        """Make the streams of hidden [rows, hidden_size]."""
        size = _size(hidden)
        others = [_resized(product(hidden), size) for product in self._widening]
        return torch.stack((hidden, *others), 1)

    def narrowed(self, streams: Tensor) -> Tensor:
        """Return the mean of the streams [rows, hidden_size], all brought to the size of the first."""
        first = streams[:, 0].contiguous()
        size, total = _size(first), first
        for stream, product in enumerate(self._narrowing, start=1):
            total = total + _resized(product(streams[:, stream].contiguous()), size)
        return total / (len(self._narrowing) + 1)


def _by_tiles(function: Callable[[slice], Tensor], streams: Tensor) -> Tensor:
    at_once = max(_TILE_NUMBERS // streams[0].numel(), 1) if len(streams) else 1
    if len(streams) <= at_once:
        return function(slice(None)).to(streams.dtype)
    made = torch.empty_like(streams)
    for first in range(0, len(streams), at_once):
        part = slice(first, first + at_once)
        made[part] = function(part)
    return made


def _weighted(shares: Tensor, weights: Tensor) -> Tensor:
    total = shares[:, :1] * weights[:, 0]
    for stream in range(1, shares.shape[1]):
        total = total + shares[:, stream, None] * weights[:, stream]
    return total


def _mean_square(x: Tensor) -> Tensor:
    return x.double().square_().mean(1, keepdim=True)


def _size(x: Tensor) -> Tensor:
    return _mean_square(x).sqrt_().to(x.dtype)


def _resized(x: Tensor, size: Tensor) -> Tensor:
    scale = _mean_square(x).clamp_(min=_LEAST).sqrt_().to(x.dtype)
    return x.mul_(size).div_(scale)
