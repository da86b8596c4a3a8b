"""The iteration log of a worker: every iteration, its duration, and where time was lost.

The time from the end of one iteration to the end of the next has seven parts, each read from a clock and none of them
the remainder of the others, so that their sum is a check:
    waiting     from the end of the last iteration until the logic starts this one, by cause
    turnaround  from there until the computing thread begins, and from its end until the logic is notified
    prepare, forward, sampling: as the engine measured them
The cause of a wait is found from the requests that end it. Before any of them had arrived there was nothing to do;
until one of them was granted to this worker, the worker waited for prefill (queue, prefill and pool); until the start,
prefetch was not ready.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from alignedserve.core.request import Request
from alignedserve.messages.cluster_view import SPREAD_EDGES, BatchShape, IterationLogTotals
from alignedserve.messages.iterations import IterationCompleted, IterationTimes

_NUM_RECORDS = 8192
_REPORT_PAUSE_S = 1.0


class IterationMember(Protocol):
    """The fields of a request that the log reads."""

    @property
    def request(self) -> Request:
        """As it arrived."""

    @property
    def granted_s(self) -> float:
        """Time at which it was granted to this worker."""

    @property
    def context_len(self) -> int:
        """Prompt and generated tokens."""


class IterationRecord(NamedTuple):
    """One iteration. Lengths are context lengths of the running requests when it started."""

    number: int  # since the worker started, from 0
    started_s: float  # when the logic started it
    batch_size: int
    is_switching: bool  # two batches mix
    shortest: int
    mean: float
    longest: int
    wall_s: float  # since the end of the iteration before; the next seven add up to it
    nothing_to_do_s: float
    waiting_for_prefill_s: float
    prefetch_not_ready_s: float
    turnaround_s: float
    prepare_s: float
    forward_s: float
    sampling_s: float
    attention_s: float  # of forward_s: attention of decoding sequences
    misaligned_s: float  # of attention_s: what stragglers cost
    is_ahead: bool  # its decodes were launched before the tokens of the one before were known
    alone_s: float = 0.0  # predicted of its real-time part, where interference is bounded and its gaps run
    straggler_share: float = 0.0  # of decode attention's time: there only because one context is longer than the others
    num_yields: int = 0  # urgent iterations that ran within this one
    yielded_s: float = 0.0  # that its pass stood still for them; not in `wall_s`, which is theirs then
    is_urgent: bool = False  # it ran within another, whose entry follows
    stopping_s: float = 0.0  # of an urgent one, until the other stood still; in the other's time

    @property
    def parts_s(self) -> float:
        """Sum of the measured parts of `wall_s`."""
        waiting_s = self.nothing_to_do_s + self.waiting_for_prefill_s + self.prefetch_not_ready_s
        return waiting_s + self.turnaround_s + self.prepare_s + self.forward_s + self.sampling_s

    @property
    def beside_s(self) -> float:
        """Time that it computed, where `alone_s` is known."""
        return self.prepare_s + self.forward_s + self.sampling_s if self.alone_s else 0.0


class WaitingTimes(NamedTuple):
    """Time between two iterations, by cause."""

    nothing_to_do_s: float
    waiting_for_prefill_s: float
    prefetch_not_ready_s: float


_NO_WAITS = WaitingTimes(0.0, 0.0, 0.0)


class _Begun:
    __slots__ = ("alone_s", "is_switching", "num_yields", "shape", "started_s", "waits", "within_s")

    def __init__(
        self, started_s: float, shape: "_BatchShape", waits: WaitingTimes, *, is_switching: bool, alone_s: float
    ) -> None:
        self.started_s = started_s
        self.shape = shape
        self.waits = waits
        self.is_switching = is_switching
        self.alone_s = alone_s
        self.num_yields = 0
        self.within_s = 0.0  # of urgent iterations, whose entries have it


class IterationLog:
    """The latest iterations and the sums over all. Called twice per iteration, at a few microseconds each."""

    def __init__(self, num_records: int = _NUM_RECORDS) -> None:
        self._records: deque[IterationRecord] = deque(maxlen=num_records)
        self._shape = _BatchShape()
        self._num_iterations = 0
        self._num_reported = 0
        self._num_tokens = 0  # generated since they were last taken
        self.latest_batch = BatchShape()
        self._begun: list[_Begun] = []  # an urgent one last
        self._completed_s: float | None = None  # the end of the last iteration, or the first time known
        self._reported_s: float | None = None

    def iteration_started(
        self,
        now: float,
        running: Collection[IterationMember],
        *,
        has_changed: bool,
        is_switching: bool = False,
        alone_s: float = 0.0,
    ) -> None:
        """Begin a record. `running`: the members of this iteration; `has_changed`: not those of the last one.

        `alone_s`: see IterationRecord. One that begins within another is urgent.
        """
        if self._completed_s is None:
            self._completed_s = now
        waits, shape = _NO_WAITS, self._shape
        if self._begun:
            shape, has_changed = _BatchShape(), True
        elif now > self._completed_s:
            waits = _split_wait(self._completed_s, now, running)
        shape.update(running, has_changed=has_changed)
        self._begun.append(_Begun(now, shape, waits, is_switching=is_switching, alone_s=alone_s))

    def iteration_completed(self, now: float, event: IterationCompleted) -> None:
        """Finish the record begun last. Lengths and members may change only after it."""
        assert self._begun, "an iteration ended that was not started"
        assert self._completed_s is not None, "an iteration without anything before it"
        begun = self._begun.pop()
        started, shape = begun.started_s, begun.shape
        times = event.times or IterationTimes(started, now, 0.0, now - started, 0.0)
        began = min(max(times.started_s, started), now)
        ended = min(max(times.finished_s, began), now)
        is_urgent = bool(self._begun)
        if is_urgent:
            wall_s, turnaround_s = ended - began, 0.0
            self._begun[-1].num_yields += 1
            self._begun[-1].within_s += wall_s
        else:
            wall_s = now - self._completed_s - begun.within_s
            # An urgent one that began when this pass had ended is in its way back.
            turnaround_s = max(began - started + now - ended - (begun.within_s - times.yielded_s), 0.0)
        record = IterationRecord(
            self._num_iterations,
            started,
            shape.size,
            begun.is_switching,
            shape.shortest,
            shape.sum / shape.size,
            shape.longest,
            wall_s,
            *begun.waits,
            turnaround_s,
            times.prepare_s,
            times.forward_s,
            times.sampling_s,
            times.attention_s,
            times.attention_s * times.straggler_share,
            times.is_ahead,
            begun.alone_s,
            times.straggler_share,
            begun.num_yields,
            times.yielded_s,
            is_urgent,
            began - started if is_urgent else 0.0,
        )
        self._records.append(record)
        self._num_tokens += len(event.sampled)
        shape.note_tokens(event)
        self._num_iterations += 1
        if not is_urgent:
            self._completed_s = now

    def take_totals(self, now: float) -> IterationLogTotals | None:
        """Return the sums since it last returned some, for the router; None if there are none, or within a second.

        Iterations that have left the latest records without being taken are not counted.
        """
        if self._completed_s is None:
            self._completed_s = now  # idle from here on
        is_early = self._reported_s is not None and now - self._reported_s < _REPORT_PAUSE_S
        num_fresh = self._num_iterations - self._num_reported
        if is_early or not num_fresh:
            return None
        self._num_reported, self._reported_s = self._num_iterations, now
        latest = self._records[-1]
        self.latest_batch = BatchShape(latest.batch_size, latest.shortest, latest.mean, latest.longest)
        return totals_of(list(islice(reversed(self._records), num_fresh)))

    def take_tokens(self) -> int:
        """Return how many tokens were generated since this was last asked."""
        num_tokens, self._num_tokens = self._num_tokens, 0
        return num_tokens

    def records(self) -> tuple[IterationRecord, ...]:
        """Return the latest iterations, oldest first."""
        return tuple(self._records)


class _BatchShape:
    """Number, sum, minimum and maximum of the running requests' context lengths.

    Counted only when the batch has changed: if all members sampled, and none joined or left, each is one token longer.
    """

    __slots__ = ("_has_all_grown", "longest", "shortest", "size", "sum")

    def __init__(self) -> None:
        self.size = self.sum = self.shortest = self.longest = 0
        self._has_all_grown = False

    def update(self, running: Collection[IterationMember], *, has_changed: bool) -> None:
        if self._has_all_grown and not has_changed and len(running) == self.size:
            self.sum += self.size
            self.shortest += 1
            self.longest += 1
            return
        lengths = [request.context_len for request in running]
        self.size, self.sum = len(lengths), sum(lengths)
        self.shortest, self.longest = min(lengths), max(lengths)

    def note_tokens(self, event: IterationCompleted) -> None:
        self._has_all_grown = len(event.sampled) == self.size and not event.forced


def totals_of(records: Sequence[IterationRecord]) -> IterationLogTotals:
    spreads = [record.longest / record.mean for record in records]
    spread_counts = [0] * (len(SPREAD_EDGES) + 1)
    for spread in spreads:
        spread_counts[bisect_left(SPREAD_EDGES, spread)] += 1
    return IterationLogTotals(
        num_iterations=len(records),
        num_switch_iterations=sum(record.is_switching for record in records),
        num_requests=sum(record.batch_size for record in records),
        wall_s=sum(record.wall_s for record in records),
        nothing_to_do_s=sum(record.nothing_to_do_s for record in records),
        waiting_for_prefill_s=sum(record.waiting_for_prefill_s for record in records),
        prefetch_not_ready_s=sum(record.prefetch_not_ready_s for record in records),
        turnaround_s=sum(record.turnaround_s for record in records),
        prepare_s=sum(record.prepare_s for record in records),
        forward_s=sum(record.forward_s for record in records),
        sampling_s=sum(record.sampling_s for record in records),
        misaligned_s=sum(record.misaligned_s for record in records),
        sum_of_spreads=sum(spreads),
        spread_counts=tuple(spread_counts),
        num_ahead_iterations=sum(record.is_ahead for record in records),
        real_time_alone_s=sum(record.alone_s for record in records),
        real_time_beside_s=sum(record.beside_s for record in records),
        sum_of_straggler_shares=sum(record.straggler_share for record in records),
        num_yields=sum(record.is_urgent for record in records),
        yielded_s=sum(record.yielded_s for record in records),
        stopping_s=sum(record.stopping_s for record in records),
    )


def _split_wait(since: float, until: float, running: Collection[IterationMember]) -> WaitingTimes:
    """Split a wait by what the first of the requests that end it was waiting for.

    All processes of a host share the clock. An arrival by another host's clock may lie anywhere; it is clamped to
    between the start of the wait and the grant, which is by this host's clock.
    """
    granted = min(max(min(request.granted_s for request in running), since), until)
    arrived = min(max(min(request.request.arrival_s for request in running), since), granted)
    return WaitingTimes(arrived - since, granted - arrived, until - granted)
