"""A step of the cost model that workers learn, by the native kernel where it is built.

The plain form is in `alignedserve.costmodel.online`, and gives the same to the last bit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.cpu.native import load_native

Floats = npt.NDArray[np.float64]

_native: Any = load_native("learn_iteration_costs")


class CostSums(NamedTuple):
    """Sums over past iterations, which a step changes."""

    products: Floats  # [features, features]
    targets: Floats  # [features]


class Priors(NamedTuple):
    """Coefficients before any iteration."""

    coefficients: Sequence[float]  # of those that are 0 none is ever learned
    scale: float  # of this machine
    weight: float  # of a coefficient that is off by its whole size, in iterations


def is_native() -> bool:
    """Return whether `learn` can be called."""
    return _native is not None


def learn(
    sums: CostSums,
    features: Sequence[float],
    *,
    weight: float,
    decay: float,
    priors: Priors,
    coefficients: Sequence[float],
) -> tuple[float, ...]:
    """Add an iteration of this weight to sums that forget by `decay`; return the coefficients, each improved once."""
    learned: tuple[float, ...] = _native.learn_iteration_costs(
        *sums, features, weight, decay, priors.coefficients, coefficients, priors.scale, priors.weight
    )
    return learned
