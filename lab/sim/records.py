"""The simulated client's record of each request, and a sample of all gaps between tokens."""

import enum
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from alignedserve.core.metrics import (
    NO_DEADLINES,
    Deadlines,
    meets_slo,
    percentile,
    tbt_s,
    token_deadlines,
    tpot_s,
    ttft_s,
)
from alignedserve.core.request import Slo
from lab.workload.requests import TimedRequest

_MAX_GAPS = 1 << 17


class RequestEnding(enum.Enum):
    """Ways in which a request ends."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    UNFINISHED = "unfinished"  # when the simulation was cut off


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One ended request. Times in seconds; None if there were too few tokens to measure."""

    number: int  # in order of sending, from 0
    class_name: str
    prompt_len: int
    num_tokens: int
    arrival_s: float
    ended_s: float
    ending: RequestEnding
    ttft_s: float | None = None
    tpot_s: float | None = None
    max_tbt_s: float | None = None
    p99_tbt_s: float | None = None
    has_met_slo: bool = False
    has_met_ttft: bool = False  # this objective alone; True without one, as soon as a first token came
    has_met_tpot: bool = False  # likewise; of completed requests only
    num_due_tokens: int = (
        0  # with an objective: TTFT for the first, TPOT for each gap; a first token that never came counts
    )
    num_timely_tokens: int = 0  # of those, met theirs
    has_met_p99: bool = False  # as `has_met_slo`, with the 99th percentile of the gaps for their mean
    num_cached_tokens: int = 0  # of the prompt, that came from the prefix cache
    deadlines: Deadlines = NO_DEADLINES  # of its tokens, by a schedule that carries time over (Etalon)

    @property
    def end_to_end_s(self) -> float:
        """Time from arrival to the last token."""
        return self.ended_s - self.arrival_s

    @property
    def normalized_s(self) -> float | None:
        """End-to-end time per output token, the normalised latency of Orca and vLLM."""
        return self.end_to_end_s / self.num_tokens if self.num_tokens else None


@dataclass(slots=True)
class SimulatedRequest:
    """One open request, as its client sees it."""

    number: int
    timed: TimedRequest
    arrival_s: float
    token_times_s: "array[float]"
    num_cached_tokens: int = field(default=0, kw_only=True)  # of its prompt

    def close(self, ending: RequestEnding, now: float, gaps: "GapSample") -> RequestRecord:
        """Build the record of the request and add its gaps to the sample."""
        timed, times = self.timed, self.token_times_s
        between = tbt_s(times)
        gaps.add(between)
        ttft, tpot = ttft_s(self.arrival_s, times), tpot_s(times)
        end_to_end = now - self.arrival_s
        is_complete = ending is RequestEnding.COMPLETED

        def has_met(slo: Slo, gap: float | None = tpot) -> bool:
            return meets_slo(slo, ttft=ttft, tpot=gap, end_to_end=end_to_end)

        ascending = sorted(between)
        p99_tbt = percentile(ascending, 99) if ascending else None
        return RequestRecord(
            self.number,
            timed.class_name,
            timed.prompt_len,
            len(times),
            self.arrival_s,
            now,
            ending,
            ttft,
            tpot,
            ascending[-1] if ascending else None,
            p99_tbt,
            is_complete and has_met(timed.slo),
            ttft is not None and has_met(Slo(ttft_s=timed.slo.ttft_s)),
            is_complete and has_met(Slo(tpot_s=timed.slo.tpot_s)),
            *_timely(timed.slo, ttft, ascending),
            is_complete and has_met(timed.slo, p99_tbt),
            self.num_cached_tokens,
            token_deadlines(
                timed.slo,
                self.arrival_s,
                times,
                ended_s=None if is_complete else now,
                is_cut=ending is RequestEnding.UNFINISHED,
            ),
        )


def _timely(slo: Slo, ttft: float | None, gaps_s: Sequence[float]) -> tuple[int, int]:
    num_due = num_timely = 0
    if slo.ttft_s is not None:
        num_due, num_timely = 1, int(ttft is not None and ttft <= slo.ttft_s)
    if slo.tpot_s is not None:
        num_due, num_timely = num_due + len(gaps_s), num_timely + bisect_right(gaps_s, slo.tpot_s)
    return num_due, num_timely


class GapSample:
    """Every k-th gap, k doubling when there are too many: an even, deterministic sample."""

    def __init__(self) -> None:
        self._gaps = array("d")
        self.step = 1  # k
        self._num_skipped = 0  # since the last one kept
        self.count = 0  # of all gaps
        self.max_s = 0.0

    def add(self, gaps_s: tuple[float, ...]) -> None:
        """Add the gaps of one request."""
        if not gaps_s:
            return
        self.count += len(gaps_s)
        self.max_s = max(self.max_s, *gaps_s)
        first = self.step - 1 - self._num_skipped
        self._gaps.extend(gaps_s[first :: self.step])
        self._num_skipped = (self._num_skipped + len(gaps_s)) % self.step
        while len(self._gaps) > _MAX_GAPS:
            self._gaps = self._gaps[::2]
            self.step *= 2
            self._num_skipped = 0

    def values(self) -> "array[float]":
        """Return the sample, in no order."""
        return self._gaps
