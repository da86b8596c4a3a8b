"""Traffic from ServeGen's description of a production day: clients, each with a rate and a burstiness per window.

A line of the file is one client: `windows` of 600 s as `[start_s, requests per second, cv, "Gamma" or "Weibull",
shape, scale]`, and `lengths` by the start of six hours: quantiles of input, output and reasoning tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
from numpy.random import Generator

from alignedserve.core.errors import ConfigError
from lab.workload.arrivals import gamma_gaps, weibull_gaps
from lab.workload.distributions import FloatArray, IntArray, TokenLengths, joined, whole
from lab.workload.text_lines import parsed_lines, read_lines

WINDOW_S = 600.0
QUANTILES = (*(number * 0.025 for number in range(40)), 0.99, 0.999, 1.0)


class _Quantiles(msgspec.Struct, frozen=True):
    q: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.q) != len(QUANTILES):
            raise ValueError(f"{len(self.q)} quantiles where {len(QUANTILES)} are expected")


class _LengthsOfHours(msgspec.Struct, frozen=True):
    input_tokens: _Quantiles
    output_tokens: _Quantiles


class _Client(msgspec.Struct, frozen=True):
    windows: tuple[tuple[float, float, float, str, float, float], ...]
    lengths: dict[str, _LengthsOfHours]


@dataclass(frozen=True, slots=True)
class ClientWindow:
    """Ten minutes of one client."""

    start_s: float
    rate: float
    is_weibull: bool
    shape: float  # of the gaps, whatever their scale: the rate sets it
    prompt_quantiles: tuple[float, ...]
    output_quantiles: tuple[float, ...]

    def arrivals(self, rng: Generator, factor: float) -> FloatArray:
        """Draw moments within the window at `factor` times its rate, the first after a part of a gap."""
        rate = self.rate * factor
        gaps = weibull_gaps if self.is_weibull else gamma_gaps
        pieces, last_s = [], -rng.random() * float(gaps(self.shape, rng, 1)[0]) / rate
        while last_s < WINDOW_S:
            moments = last_s + np.cumsum(gaps(self.shape, rng, int(rate * WINDOW_S) + 16)) / rate
            pieces.append(moments)
            last_s = float(moments[-1])
        drawn = np.concatenate(pieces)
        return self.start_s + drawn[(drawn >= 0) & (drawn < WINDOW_S)]

    def draw(self, rng: Generator, count: int) -> TokenLengths:
        prompt_len = whole(np.interp(rng.random(count), QUANTILES, self.prompt_quantiles))
        return TokenLengths(prompt_len, whole(np.interp(rng.random(count), QUANTILES, self.output_quantiles)))


@dataclass(frozen=True)  # without slots: what is worked out from the windows stays
class ClientDay:
    """All windows of all clients."""

    windows: tuple[ClientWindow, ...]

    @cached_property
    def _quantiles(self) -> tuple[FloatArray, FloatArray]:
        return (
            np.array([window.prompt_quantiles for window in self.windows]),
            np.array([window.output_quantiles for window in self.windows]),
        )

    def draw(self, rng: Generator, count: int) -> TokenLengths:
        rates = np.array([window.rate for window in self.windows])
        chosen = rng.choice(len(rates), size=count, p=rates / rates.sum())
        prompts, outputs = (_between(rows[chosen], rng.random(count)) for rows in self._quantiles)
        return TokenLengths(whole(prompts), whole(outputs))

    def mean_rate(self, start_s: float, duration_s: float) -> float:
        expected = sum(window.rate * _overlap_s(window, start_s, start_s + duration_s) for window in self.windows)
        return expected / duration_s

    @property
    def end_s(self) -> float:
        return max(window.start_s for window in self.windows) + WINDOW_S

    def generate(
        self, rng: Generator, *, start_s: float, duration_s: float, factor: float = 1.0
    ) -> tuple[FloatArray, TokenLengths]:
        """Generate arrivals in [0, duration), which is [start, start + duration) of the day, in order, and their
        lengths.

        `factor` multiplies every client's rate. Raises ConfigError when nothing falls into the part.
        """
        chosen = [window for window in self.windows if _overlap_s(window, start_s, start_s + duration_s) > 0]
        moments: list[FloatArray] = []
        lengths: list[TokenLengths] = []
        for window in chosen:
            arrivals = window.arrivals(rng, factor) - start_s
            arrivals = arrivals[(arrivals >= 0) & (arrivals < duration_s)]
            moments.append(arrivals)
            lengths.append(window.draw(rng, len(arrivals)))
        if not sum(len(some) for some in moments):
            raise ConfigError(f"no client sends anything between {start_s:g} s and {start_s + duration_s:g} s")
        arrival_s = np.concatenate(moments)
        order: IntArray = np.argsort(arrival_s, kind="stable")
        return arrival_s[order], joined(lengths).take(order)


def _between(quantiles: FloatArray, shares: FloatArray) -> FloatArray:
    levels = np.array(QUANTILES)
    below = np.searchsorted(levels, shares, side="right") - 1  # shares are below 1: a level above exists
    part = (shares - levels[below]) / (levels[below + 1] - levels[below])
    rows = np.arange(len(shares))
    lower, upper = quantiles[rows, below], quantiles[rows, below + 1]
    return np.asarray(lower + part * (upper - lower))


def _overlap_s(window: ClientWindow, start_s: float, end_s: float) -> float:
    return max(0.0, min(end_s, window.start_s + WINDOW_S) - max(start_s, window.start_s))


def read_clients(path: Path) -> ClientDay:
    """Return the file described above. Raises ConfigError naming the line."""
    clients = parsed_lines(read_lines(path), 1, _windows_of_line, str(path))
    windows = tuple(window for client in clients for window in client)
    if not windows:
        raise ConfigError(f"{path}: no clients in it")
    return ClientDay(windows)


def _windows_of_line(line: str) -> list[ClientWindow]:
    client = msgspec.json.decode(line, type=_Client)
    if not client.lengths:
        raise ValueError("a client without lengths")
    starts = sorted(int(start) for start in client.lengths)
    windows = []
    for start_s, rate, _cv, distribution, shape, _scale in client.windows:
        if distribution not in ("Gamma", "Weibull") or rate <= 0 or shape <= 0:
            raise ValueError(f"window {start_s:g}: {distribution} with rate {rate:g} and shape {shape:g}")
        # The lengths of its six hours, or of the nearest that the client has.
        nearest = min(starts, key=lambda start: (start > start_s, abs(start - start_s)))
        lengths = client.lengths[str(nearest)]
        windows.append(
            ClientWindow(
                start_s, rate, distribution == "Weibull", shape, lengths.input_tokens.q, lengths.output_tokens.q
            )
        )
    return windows
