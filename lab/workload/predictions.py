"""Predicted lengths of answers, made from the true ones as well or as badly as a predictor knows them."""

import enum
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from alignedserve.core.errors import ConfigError
from lab.workload.distributions import parse_number
from lab.workload.lengths import IntArray, whole


class PredictionKind(enum.Enum):
    """Quality of a prediction."""

    EXACT = "exact"
    CLASS_MEAN = "mean"  # of the class of traffic
    NOISY = "error"  # the true length times a log-normal error


@dataclass(frozen=True, slots=True)
class PredictionModel:
    """Model that makes predicted lengths from true ones.

    `sigma`: deviation of the error's logarithm; its median is 1.
    """

    kind: PredictionKind
    sigma: float = 0.0

    def predict(self, output_len: IntArray, *, mean_len: float, rng: Generator) -> IntArray:
        if self.kind is PredictionKind.CLASS_MEAN:
            return whole(np.full(len(output_len), mean_len))
        if self.kind is PredictionKind.EXACT:
            return np.maximum(1, output_len)
        return whole(output_len.astype(np.float64) * np.exp(self.sigma * rng.standard_normal(len(output_len))))


def parse_prediction(text: str) -> PredictionModel:
    if text in ("exact", "mean"):
        return PredictionModel(PredictionKind(text))
    if text.startswith("error(") and text.endswith(")"):
        sigma = parse_number("error", text[6:-1])
        if 0 <= sigma <= 5:
            return PredictionModel(PredictionKind.NOISY, sigma)
        raise ConfigError(f"{text!r}: the deviation of the logarithm must lie between 0 and 5")
    raise ConfigError(f"{text!r}: predictions are exact, mean or error(sigma)")
