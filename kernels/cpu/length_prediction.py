"""Arithmetic of the prediction of output lengths, by the native kernels where they are built.

Plain forms stand with their callers, `router.prediction`: an interpreter needs a hundred microseconds for each of them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu.native import load_native

Array = npt.NDArray[np.float32]

EPSILON = 1e-8  # of Adam, as in its paper

_native: Any = load_native("hash_ngrams")


def is_native() -> bool:
    """Return whether `hash_ngrams` and `descend` can be called."""
    return _native is not None


def hash_ngrams(token_ids: Sequence[int], num_features: int, key_len: int) -> tuple[Array, Array]:
    """Return the signed square roots of counts of tokens and pairs, and these folded; each scaled to length 1. float32
    [num_features], a power of two, and [key_len], which divides it. `token_ids`: 0 to 2^64 - 1."""
    features, key = np.empty(num_features, np.float32), np.empty(key_len, np.float32)
    _native.hash_ngrams(tuple(token_ids), features, key)
    return features, key


class AdamState(NamedTuple):
    """A network with one hidden layer and one output, and its running means of gradients and their squares. Each part:
    weights [inputs, hidden], their bias, out weights [hidden], out bias, in one run of memory."""

    parameters: Array
    moments: Array
    squares: Array


def can_descend(num_hidden: int, num_rows: int) -> bool:
    """Return whether `descend` takes networks and batches of these sizes."""
    return is_native() and num_hidden == _native.LENGTH_HIDDEN and num_rows <= _native.LENGTH_ROWS


def descend(
    state: AdamState, inputs: Array, targets: Array, rows: npt.NDArray[np.int64], rates: tuple[float, float, float]
) -> None:
    """Take one step of Adam, in place, on the mean squared error of these rows of inputs [all, inputs]. `targets`
    [all]; `rows`: int64, as many as `can_descend` was asked for. All others are float32 and contiguous: of parameters
    that are not, a copy would be stepped. `rates`: of learning, and the shares of a new gradient and of its square in
    the running means."""
    _native.descend(*state, inputs, targets, rows, *rates, EPSILON)
