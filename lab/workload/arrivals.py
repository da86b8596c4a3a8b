"""Arrival times of requests: gaps of a wanted rate and burstiness, and rates that follow the time of day.

All processes are drawn with a mean gap of 1 and stretched afterwards: the same generator at another rate gives the
same pattern, faster or slower, so that a sweep over rates compares like with like.
"""

import enum
import math
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from alignedserve.core.errors import ConfigError
from lab.workload.distributions import FloatArray

MAX_ARRIVALS = 10_000_000  # more in one workload is a mistake
_BLOCK = 4096


class GapDistribution(enum.Enum):
    """Distribution of gaps with a given coefficient of variation."""

    GAMMA = "gamma"
    WEIBULL = "weibull"


@dataclass(frozen=True, slots=True)
class Renewal:
    """Independent gaps with mean 1 and a coefficient of variation. 1: Poisson, 0: evenly spaced.

    Gamma gaps have shape 1 / cv^2 and scale cv^2 / rate (Apt-Serve, section 6.3). Raises ConfigError.
    """

    cv: float = 1.0
    distribution: GapDistribution = GapDistribution.GAMMA

    def __post_init__(self) -> None:
        if not 0.0 <= self.cv <= 100.0:
            raise ConfigError("cv must lie between 0 and 100")

    def gaps(self, rng: Generator, count: int) -> FloatArray:
        if self.cv == 0:
            return np.ones(count)
        if self.distribution is GapDistribution.WEIBULL:
            shape = weibull_shape(self.cv)
            return weibull_gaps(shape, rng, count)
        return gamma_gaps(1.0 / self.cv**2, rng, count)

    def arrivals(self, rng: Generator, *, count: int | None, until: float) -> FloatArray:
        """Draw moments below `until`, at most `count`, in units of the mean gap; the first comes after one gap."""
        most = MAX_ARRIVALS if count is None else count
        pieces: list[FloatArray] = []
        last, num_drawn = 0.0, 0
        while num_drawn < most and last < until:
            moments = last + np.cumsum(self.gaps(rng, min(_BLOCK, most - num_drawn)))
            pieces.append(moments)
            last, num_drawn = float(moments[-1]), num_drawn + len(moments)
        if count is None and last < until:
            raise ConfigError(f"the workload has more than {MAX_ARRIVALS} requests")
        drawn = np.concatenate(pieces) if pieces else np.empty(0)
        return drawn[drawn < until]


def gamma_gaps(shape: float, rng: Generator, count: int) -> FloatArray:
    return rng.gamma(shape, 1.0 / shape, count)


def weibull_gaps(shape: float, rng: Generator, count: int) -> FloatArray:
    return rng.weibull(shape, count) / math.exp(math.lgamma(1.0 + 1.0 / shape))


def weibull_shape(cv: float) -> float:
    """Return the shape whose gaps have this coefficient of variation, by bisection: cv falls as the shape grows."""

    def cv_of(shape: float) -> float:
        log_ratio = math.lgamma(1.0 + 2.0 / shape) - 2.0 * math.lgamma(1.0 + 1.0 / shape)
        return math.sqrt(math.expm1(log_ratio)) if log_ratio < 500.0 else math.inf

    low, high = 0.05, 500.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cv_of(middle) > cv else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class RateProfile:
    """Relative load of each step of time; it begins anew when it ends."""

    step_s: float
    weights: tuple[float, ...]

    def stretch(self, arrivals: FloatArray, *, rate: float, start_s: float) -> FloatArray:
        """Return the seconds from `start_s` of the profile on, for moments of a process with mean gap 1.

        `rate` is the mean over the whole profile (`rate_of_whole` finds it from that of a part). Time passes faster
        where it is busy: the moments are looked up in the inverse of the summed rate (time change of a point process),
        so that burstiness stays.
        """
        weights = np.array(self.weights)
        rates = weights * (rate / weights.mean())
        summed = np.concatenate([[0.0], np.cumsum(rates * self.step_s)])  # requests expected until each step's end
        span_s, per_round = self.step_s * len(weights), float(summed[-1])
        moments = np.arange(len(summed)) * self.step_s
        before = float(np.interp(start_s % span_s, moments, summed))
        rounds, rest = np.divmod(before + arrivals, per_round)
        return np.asarray(rounds * span_s + np.interp(rest, summed, moments) - start_s % span_s, dtype=np.float64)

    def rate_of_whole(self, *, rate: float, start_s: float, duration_s: float) -> float:
        """Return the mean rate of the whole profile at which a part of it has `rate` on average. Raises ConfigError."""
        edges = np.arange(len(self.weights) + 1) * self.step_s
        summed = np.concatenate([[0.0], np.cumsum(self.weights)]) * self.step_s
        span_s, per_round = float(edges[-1]), float(summed[-1])

        def until(moment_s: float) -> float:
            rounds, rest_s = divmod(moment_s, span_s)
            return rounds * per_round + float(np.interp(rest_s, edges, summed))

        share = (until(start_s + duration_s) - until(start_s)) / per_round
        if share <= 0:
            raise ConfigError(f"the profile has no requests in the {duration_s:g} s after {start_s:g} s")
        return rate * duration_s / (share * span_s)
