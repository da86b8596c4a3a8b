"""A workload: requests with the moments at which they come, and loops whose next request waits for an earlier one."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from alignedserve.batches.hours import Schedule
from alignedserve.core.request import RequestClass, Slo

NO_SLO = Slo()
LEAD_IN = " (lead-in)"  # after the class name of a request that is played and not counted


class TextRun(NamedTuple):
    """A number of tokens of a text; equal texts have equal tokens, two different ones differ from the first on."""

    text: int | str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request of a workload. What a server cannot know on arrival is here too: how long its answer will be."""

    arrival_s: float  # from the start of the run
    prompt_len: int
    output_len: int  # tokens that the answer will have
    max_tokens: int | None  # the client's limit, which output_len never exceeds; None: it sets none
    class_name: str  # of the traffic it belongs to: a row in reports
    request_class: RequestClass = RequestClass.REAL_TIME
    slo: Slo = NO_SLO
    priority: int = 0  # smaller goes first among equals
    predicted_len: int | None = None  # of the answer; None: no prediction
    runs: tuple[TextRun, ...] = ()  # of texts that the prompt begins with; the rest of it is its own (prompt_texts.py)
    answer: int | str | None = None  # text of the answer, where later prompts may repeat it
    follow_up: "TimedRequest | None" = None  # the next turn; its arrival counts from the end of this one
    tenant: str = ""  # the client that it counts for where several share (alignedserve/core/fair_shares.py)
    weight: float = 1.0  # of that client's share
    num_encoder_tokens: int = 0  # what an encoder's passes over its pictures cost, in prompt tokens

    @property
    def final_context_len(self) -> int:
        """Return the tokens that the request holds in the end."""
        return self.prompt_len + self.output_len


@dataclass(frozen=True, slots=True)
class WorkloadDescription:
    """Origin of a workload, as it stands in results: enough to make it again."""

    name: str
    seed: int
    parameters: Mapping[str, str | float | int | None] = field(default_factory=dict)


class RequestSource(Protocol):
    """Endless requests by number; each is always the same, in whatever order they are taken."""

    def __getitem__(self, number: int) -> TimedRequest:
        """Return the request of a number; its arrival is 0."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """The times of a run at which requests of a class may start: as lines of a batch with the same schedule."""

    schedule: Schedule
    begins_s: float = 0.0  # Unix time at which the run begins

    def next_s(self, time_s: float) -> float:
        now = self.begins_s + time_s
        return time_s if self.schedule.is_open(now) else self.schedule.after(now, 0.0) - self.begins_s

    def in_window(self, begins_s: float) -> "StartTimes":
        return StartTimes(self.schedule, self.begins_s + begins_s)


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Traffic that waits for itself: `size` requests in the air."""

    class_name: str
    size: int
    is_wave: bool  # the next `size` requests come when all have ended, else one for each that ends
    stream: RequestSource
    think_s: float = 0.0  # from an end to the next request
    starts: StartTimes | None = None  # None: at any time


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and closed loops beside them.

    `ends_s` is the end of the run where one was asked for (or where the last open-loop request comes). Closed loops
    start nothing from then on, nor after `max_closed` requests of all loops together; one of the two is set where
    there are loops.
    """

    description: WorkloadDescription
    requests: tuple[TimedRequest, ...]
    closed_loops: tuple[ClosedLoop, ...] = ()
    ends_s: float | None = None
    max_closed: int | None = None


class TimeWindow(NamedTuple):
    """A stretch of a workload, and how much of what comes before it is played as well."""

    start_s: float
    end_s: float
    lead_in_s: float = 0.0

    @property
    def begins_s(self) -> float:
        """Return when its first requests come."""
        return max(self.start_s - self.lead_in_s, 0.0)


def window_of(workload: Workload, window: TimeWindow) -> Workload:
    """Return what comes in a window, with times from its beginning.

    Requests of the lead-in have class names of their own, so that they are not counted. Closed loops send for as long.
    """

    def arrival_s(request: TimedRequest) -> float:
        return request.arrival_s

    begins_s, requests = window.begins_s, workload.requests
    places = [bisect_left(requests, time_s, key=arrival_s) for time_s in (begins_s, window.start_s, window.end_s)]
    led_in = (in_every_turn(request, _in_lead_in) for request in requests[places[0] : places[1]])
    moved = (
        replace(request, arrival_s=request.arrival_s - begins_s)
        for request in (*led_in, *requests[places[1] : places[2]])
    )
    ends_s = window.end_s if workload.ends_s is None else min(workload.ends_s, window.end_s)
    loops = tuple(
        loop if loop.starts is None else replace(loop, starts=loop.starts.in_window(begins_s))
        for loop in workload.closed_loops
    )
    return replace(workload, requests=tuple(moved), closed_loops=loops, ends_s=ends_s - begins_s)


def turns_of(request: TimedRequest) -> Iterator[TimedRequest]:
    """Yield a request, and the later turns of its conversation if it has any."""
    turn: TimedRequest | None = request
    while turn is not None:
        yield turn
        turn = turn.follow_up


def in_every_turn(request: TimedRequest, change: Callable[[TimedRequest], TimedRequest]) -> TimedRequest:
    """Return the request and its later turns, each changed."""
    changed = [change(turn) for turn in turns_of(request)]
    first = changed.pop()
    while changed:
        first = replace(changed.pop(), follow_up=first)
    return first


def _in_lead_in(request: TimedRequest) -> TimedRequest:
    return replace(request, class_name=request.class_name + LEAD_IN)


def sped_up(workload: Workload, factor: float) -> Workload:
    """Return the workload with arrivals `factor` times as fast; closed loops and later turns stay as they are."""
    requests = tuple(replace(request, arrival_s=request.arrival_s / factor) for request in workload.requests)
    ends_s = None if workload.ends_s is None else workload.ends_s / factor
    return replace(workload, requests=requests, ends_s=ends_s)


class ClosedLoopRun:
    """The closed loops and conversations of one run: tells a driver what to send when something ends.

        arrivals += run.first()                                        # at time 0
        arrivals += run.after(request, finished_s)                     # whenever a request was answered
        arrivals += run.next_after(request.class_name, finished_s)     # whenever one failed or was refused

    The n-th request of a loop is the same in every run over the same workload, whatever the server's order. A driver
    waits a little before it reports a refusal; otherwise a server that refuses all is asked for ever.
    """

    def __init__(self, workload: Workload) -> None:
        self._loops = {loop.class_name: loop for loop in workload.closed_loops}
        self._ends_s, self._num_left = workload.ends_s, workload.max_closed
        assert not self._loops or self._ends_s is not None or self._num_left is not None, "loops without an end"
        self._next_number = dict.fromkeys(self._loops, 0)
        self._num_in_air = dict.fromkeys(self._loops, 0)

    def first(self) -> list[TimedRequest]:
        """Return the requests to send at the start."""
        return [request for loop in self._loops.values() for request in self._take(loop, loop.size, 0.0)]

    def after(self, request: TimedRequest, finished_s: float) -> list[TimedRequest]:
        """Return the next turn of an answered request's conversation; after the last one as `next_after`."""
        turn = request.follow_up
        if turn is None:
            return self.next_after(request.class_name, finished_s)
        arrival_s = finished_s + turn.arrival_s
        if self._ends_s is not None and arrival_s >= self._ends_s:
            return self.next_after(request.class_name, finished_s)
        return [replace(turn, arrival_s=arrival_s)]

    def next_after(self, class_name: str, finished_s: float) -> list[TimedRequest]:
        """Return the requests to send because all of one of this class ended; none for classes of the open loop."""
        loop = self._loops.get(class_name)
        if loop is None:
            return []
        self._num_in_air[class_name] -= 1
        if not loop.is_wave:
            return self._take(loop, 1, finished_s + loop.think_s)
        return self._take(loop, loop.size, finished_s + loop.think_s) if self._num_in_air[class_name] == 0 else []

    def _take(self, loop: ClosedLoop, count: int, now_s: float) -> list[TimedRequest]:
        if loop.starts is not None:
            now_s = loop.starts.next_s(now_s)
        if self._ends_s is not None and now_s >= self._ends_s:
            return []
        if self._num_left is not None:
            count = min(count, self._num_left)
            self._num_left -= count
        first = self._next_number[loop.class_name]
        self._next_number[loop.class_name] += count
        self._num_in_air[loop.class_name] += count
        return [replace(loop.stream[number], arrival_s=now_s) for number in range(first, first + count)]
