"""Tensors that are computed with in float32, whatever the dtype of the model."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class ExactSource(Protocol):
    """A source that has the values as its files do."""

    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor in float32, on its device. Raises ModelError naming it."""


class RoundedSource(Protocol):
    """A source that has the values in the dtype of the model."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor. Raises ModelError naming it."""


def exact_tensor(source: RoundedSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in float32, rounded before only where the source knows no better. Raises ModelError."""
    if isinstance(source, ExactSource):
        return source.exact(name, shape)
    return source.tensor(name, shape).to(torch.float32)
