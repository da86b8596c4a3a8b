"""Turns the hidden states of one text, or of a pair, into its vector or score.

Each by itself: elementwise functions of a library may round the last elements of an array in another way, so that what
shares an array could change a result.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from alignedserve.runtime.model.encoder.encoder_config import EncoderConfig, HeadActivation, Pooling
from alignedserve.runtime.model.encoder.encoder_weights import DenseLayer

_ACTIVATIONS: Mapping[HeadActivation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        HeadActivation.IDENTITY: lambda x: x,
        HeadActivation.SIGMOID: torch.sigmoid,
        HeadActivation.TANH: torch.tanh,
        HeadActivation.RELU: torch.relu,
    }
)


class TextHead:
    """Pooling and the layers after it; of a cross-encoder the first token and its classifier."""

    def __init__(self, config: EncoderConfig, layers: Sequence[DenseLayer]) -> None:
        self._pooling = Pooling.CLS if config.score is not None else config.embedding.pooling
        self._layers = tuple(layers)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute hidden [tokens, hidden_size] of one prompt -> float32 [vector_width]."""
        vector = _POOLINGS[self._pooling](hidden).float()
        for layer in self._layers:
            vector = _ACTIVATIONS[layer.activation](layer.product(vector[None])[0])
        return vector


def _weighted_mean(hidden: Tensor) -> Tensor:
    weights = torch.arange(1, len(hidden) + 1, dtype=torch.float64, device=hidden.device)[:, None]
    return (hidden.double() * weights).sum(0) / weights.sum()


_POOLINGS: Mapping[Pooling, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Pooling.CLS: lambda hidden: hidden[0],
        Pooling.MEAN: lambda hidden: hidden.double().mean(0),
        Pooling.MAX: lambda hidden: hidden.amax(0),
        Pooling.MEAN_SQRT: lambda hidden: hidden.double().sum(0) / len(hidden) ** 0.5,
        Pooling.WEIGHTED_MEAN: _weighted_mean,
        Pooling.LAST: lambda hidden: hidden[-1],
    }
)
