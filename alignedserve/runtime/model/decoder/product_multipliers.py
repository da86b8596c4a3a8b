"""Factors of what a layer's products make, of families that have such (Falcon-H1); without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProductMultipliers:
    """They are multiplied into the weights when these are loaded."""

    queries: float
    keys: float
    values: float
    mixer_inputs: tuple[float, float, float, float, float]  # of gates, inputs, b, c and time steps of Mamba-2
    attended: float  # of what attention adds to the residual stream
    mixed: float  # of what the mixer beside it does
    gates: float  # of the feed-forward part, before the nonlinearity
    down: float
