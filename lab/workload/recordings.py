"""Sources that know when their requests came: traces, and days that are generated anew from a description."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.random import Generator

from alignedserve.core.errors import ConfigError
from lab.workload import traces
from lab.workload.distributions import FloatArray, IntArray, TokenLengths
from lab.workload.requests import TextRun
from lab.workload.servegen import ClientDay
from lab.workload.traces import TraceRow


@dataclass(frozen=True, slots=True)
class Extract:
    """Part of a recording that is wanted, and its speed."""

    start_s: float = 0.0  # of the recording's own time
    duration_s: float | None = None  # of the workload's time, after scaling; None: to the end
    rate: float | None = None  # mean requests per second of what is played; None: as recorded
    is_repeated: bool = False  # from the beginning again when it is over before duration_s


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Requests as they came, earliest first."""

    arrival_s: FloatArray
    lengths: TokenLengths
    runs: Sequence[tuple[TextRun, ...]]  # of texts that the prompts begin with

    def take(self, rows: IntArray) -> "Recording":
        runs = [self.runs[place] for place in rows.tolist()]
        return Recording(self.arrival_s[rows], self.lengths.take(rows), runs)


@runtime_checkable
class RecordedSource(Protocol):
    """Source of requests with their arrivals."""

    def draw(self, rng: Generator, count: int) -> TokenLengths:
        """Draw lengths and terms, rows at random."""

    def record(self, rng: Generator, extract: Extract) -> Recording:
        """Return the requests of a part. Raises ConfigError when there are none, or no rate to scale."""


class TraceSource:
    """A trace file. Its part is the same every time; nothing in it is random."""

    def __init__(self, rows: Sequence[TraceRow]) -> None:
        self._rows = rows

    @cached_property
    def _lengths(self) -> TokenLengths:
        return _columns(self._rows).lengths

    @property
    def models(self) -> list[str]:
        """Return the models that the rows name, in order of their names."""
        return sorted({row.model for row in self._rows if row.model is not None})

    def draw(self, rng: Generator, count: int) -> TokenLengths:
        """Draw lengths and terms of rows at random."""
        return self._lengths.draw(rng, count)

    def record(self, rng: Generator, extract: Extract) -> Recording:
        """Return the rows from the start on, at the wanted rate, until the duration is over."""
        rows = traces.window(self._rows, extract.start_s, None)
        if extract.rate is not None:
            rows = traces.at_rate(rows, extract.rate, extract.duration_s, is_repeated=extract.is_repeated)
        elif extract.is_repeated and extract.duration_s is not None:
            rows = traces.repeated(rows, extract.duration_s)
        return _columns(traces.window(rows, 0.0, extract.duration_s))


def _columns(rows: Sequence[TraceRow]) -> Recording:
    lengths = np.array([(row.prompt_len, row.output_len) for row in rows], dtype=np.int64)
    terms = np.array([row.terms for row in rows], dtype=object)
    return Recording(
        arrival_s=np.array([row.arrival_s for row in rows]),
        lengths=TokenLengths(lengths[:, 0], lengths[:, 1], terms if terms.any() else None),
        runs=[row.runs for row in rows],
    )


@dataclass(frozen=True, slots=True)
class ClientDaySource:
    """A day of ServeGen's clients, generated anew for every generator."""

    day: ClientDay

    def draw(self, rng: Generator, count: int) -> TokenLengths:
        return self.day.draw(rng, count)

    def record(self, rng: Generator, extract: Extract) -> Recording:
        """Generate arrivals by the clients' distributions, every client's rate scaled alike, without repetition."""
        if extract.is_repeated:
            raise ConfigError("repeat=: a generated day is not repeated; choose another part with start=")
        duration_s = extract.duration_s or self.day.end_s - extract.start_s
        rate = self.day.mean_rate(extract.start_s, duration_s) if duration_s > 0 else 0.0
        if not rate:
            raise ConfigError(f"no client sends anything in the {duration_s:g} s after {extract.start_s:g} s")
        factor = 1.0 if extract.rate is None else extract.rate / rate
        arrival_s, lengths = self.day.generate(rng, start_s=extract.start_s, duration_s=duration_s, factor=factor)
        return Recording(arrival_s, lengths, [()] * len(arrival_s))
