"""Observations of a recorded run: its requests with the times of their tokens, and the durations of its work.

All of it follows from the components' recordings: their events, times and commands.
"""

from array import array
from dataclasses import dataclass, field
from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.work import IterationWork
from alignedserve.messages.events import Received, Send, SendTo
from alignedserve.messages.gateways import RequestFailed, RequestRejected, SubmitRequest, TokensEmitted
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BlocksRelayed,
    IterationCompleted,
    LoadBlocks,
    OffloadBlocks,
    RelayBlocks,
    RunIteration,
)
from alignedserve.messages.workers import PrefillCompleted, PrefillRequest, RequestFinished
from alignedserve.scheduling.policy import DeviceMemory
from lab.replay.component_replay import Decided
from lab.sim.engine import SimulatedAnswer, SimulatedEngine
from router.state import LengthPredicted

_MATCHED = (PrefillRequest, PrefillCompleted, RequestFinished)  # messages that come once for each attempt
_ENDLESS = SimulatedAnswer(1 << 40)
_ANY_MEMORY = DeviceMemory(1, 1, 1, 0)  # copies to the host count in whole tokens


@dataclass(slots=True)
class ObservedRequest:
    """One request as seen by the components."""

    request: Request  # without its tokens
    submitted_s: float  # when the router got it
    predicted_len: float | None = None  # of its answer, as predicted on its arrival
    token_times_s: dict[int, float] = field(default_factory=dict)  # by index in the answer, when first sent
    finished_s: float | None = None
    is_refused: bool = False  # rejected or failed

    @property
    def times_in_order(self) -> "array[float]":
        """Times at which workers sent the tokens, from the first to the first gap."""
        times = array("d")
        while (time_s := self.token_times_s.get(len(times))) is not None:
            times.append(time_s)
        return times


@dataclass(frozen=True, slots=True)
class ObservedIteration:
    """One iteration of a worker, from RunIteration to IterationCompleted."""

    worker: str
    started_s: float
    ended_s: float
    work: IterationWork
    engine_s: float  # measured by the engine: policies learn this time
    stood_still_s: float = 0.0  # during urgent iterations between two layers

    @property
    def seconds(self) -> float:
        """How long it ran itself."""
        return self.ended_s - self.started_s - self.stood_still_s


@dataclass(frozen=True, slots=True)
class ObservedCopy:
    """One copy of blocks between memories."""

    num_blocks: int
    seconds: float  # from the command to its completion event
    has_pool_end: bool
    ended_s: float


class ObservedRun:
    """Collects the decisions of all components, one component after the other."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, ObservedRequest] = {}
        self.iterations: list[ObservedIteration] = []
        self.copies: list[ObservedCopy] = []
        self.measured: dict[str, tuple[Sample, ...]] = {}  # by worker: what it measured before it served
        self._refused: set[RequestId] = set()
        self._emitted: list[tuple[float, TokensEmitted]] = []
        self._sent: dict[tuple[object, ...], float] = {}
        self._received: dict[tuple[object, ...], float] = {}

    def observer(self, name: str, pool: str | None, measured: tuple[Sample, ...] = ()) -> "ComponentObserver":
        """Create the observer of one component.

        `pool`: the pool of a worker's node. `measured`: what it measured before it served.
        """
        if measured:
            self.measured[name] = measured
        return ComponentObserver(self, name, pool)

    def complete(self) -> None:
        """Combine the observations once all components have been read."""
        for now, message in self._emitted:
            for delta in message.deltas:
                seen = self.requests.get(delta.request_id)
                if seen is None:
                    continue
                for index in range(delta.first_index, delta.first_index + len(delta.token_ids)):
                    seen.token_times_s[index] = min(now, seen.token_times_s.get(index, now))
                if delta.finish_reason is not None:
                    seen.finished_s = now
        for request_id in sorted(self._refused & self.requests.keys()):
            self.requests[request_id].is_refused = True
        self._emitted.clear()

    def within(self, *spans_s: tuple[float, float]) -> "ObservedRun":
        """Return what was observed in these spans; a request counts where it arrived."""

        def is_in(time_s: float) -> bool:
            return any(begin_s <= time_s < end_s for begin_s, end_s in spans_s)

        part = ObservedRun()
        part.measured = self.measured
        part.requests = {key: request for key, request in self.requests.items() if is_in(request.request.arrival_s)}
        part.iterations = [iteration for iteration in self.iterations if is_in(iteration.started_s)]
        part.copies = [copy for copy in self.copies if is_in(copy.ended_s)]
        part._received = {key: time_s for key, time_s in self._received.items() if is_in(time_s)}
        part._sent = self._sent
        return part

    def submit_times_s(self) -> list[float]:
        """Return the times from the arrivals of requests at gateways to their router, in their order."""
        return [request.submitted_s - request.request.arrival_s for request in self.requests.values()]

    def message_times_s(self) -> list[float]:
        """Return the latencies of the messages that can be matched at both ends."""
        return [time_s - self._sent[key] for key, time_s in self._received.items() if key in self._sent]

    # --- for ComponentObserver

    def record_sent(self, message: object, now: float) -> None:
        """Record a message that a component sends."""
        if isinstance(message, _MATCHED):
            key = _key(message)
            self._sent.setdefault(key, now)
        elif isinstance(message, RequestRejected | RequestFailed):
            self._refused.add(message.request_id)

    def record_received(self, message: object, now: float) -> None:
        """Record a message that a component receives."""
        if isinstance(message, SubmitRequest):
            self.requests[message.request.request_id] = ObservedRequest(message.request, now)
        elif isinstance(message, _MATCHED):
            self._received.setdefault(_key(message), now)

    def record_predicted(self, event: LengthPredicted) -> None:
        """Record the predicted length of an answer; the first one, if the request was tried again."""
        seen = self.requests.get(event.request_id)
        if seen is not None and seen.predicted_len is None:
            seen.predicted_len = event.predicted_len

    def record_emitted(self, message: TokensEmitted, now: float) -> None:
        """Record tokens that a worker sends."""
        self._emitted.append((now, message))


class ComponentObserver:
    """Observes one process of one component."""

    def __init__(self, run: ObservedRun, name: str, pool: str | None) -> None:
        self._run = run
        self._name = name
        self._pool = pool
        self._recording_costs = _RecordingCosts()
        self._engine = SimulatedEngine(self._recording_costs, _UnknownAnswers(), _ANY_MEMORY, keeps_timeline=False)
        self._running: dict[bool, tuple[float, IterationWork]] = {}  # start and work, by whether it is urgent
        self._begun_s: dict[object, float] = {}  # copies under way

    def take(self, decided: Decided) -> None:
        event, now, commands = decided
        if isinstance(event, Received):
            self._run.record_received(event.message, now)
        elif isinstance(event, IterationCompleted):
            self._run.iterations.append(self._iteration(event, now))
        elif isinstance(event, LengthPredicted):
            self._run.record_predicted(event)
        elif isinstance(event, BlocksLoaded | BlocksOffloaded | BlocksRelayed):
            self._copied(event, now)
        for command in commands:
            self._observe(command, now)

    def _iteration(self, event: IterationCompleted, now: float) -> ObservedIteration:
        started_s, work = self._running[event.is_urgent]
        engine_s, times = event.duration_s(started_s, now), event.times
        if times is None:
            return ObservedIteration(self._name, started_s, now, work, engine_s)
        if event.is_urgent:
            started_s = times.started_s
        return ObservedIteration(self._name, started_s, now, work, engine_s, times.yielded_s)

    def _observe(self, command: object, now: float) -> None:
        match command:
            case Send(_, message):
                self._run.record_sent(message, now)
            case SendTo(_, TokensEmitted() as message):
                self._run.record_emitted(message, now)
            case RunIteration():
                self._engine.begin(command, now)
                self._running[command.is_urgent] = (now, self._recording_costs.latest)
            case LoadBlocks(_, loads):
                self._begun_s[loads] = now
            case OffloadBlocks() | RelayBlocks():
                self._begun_s[command] = now

    def _copied(self, event: BlocksLoaded | BlocksOffloaded | BlocksRelayed, now: float) -> None:
        if isinstance(event, BlocksLoaded):
            key: object = event.loads
            num_blocks = sum(part.copy.num_blocks for part in event.loads)
            has_pool_end = event.source == self._pool
        else:
            key, num_blocks = event.command, len(event.command.target_block_ids)
            has_pool_end = isinstance(event, BlocksRelayed) or event.command.target == self._pool
        begun_s = self._begun_s.pop(key, None)
        if begun_s is not None:
            self._run.copies.append(ObservedCopy(num_blocks, now - begun_s, has_pool_end, now))


def _key(message: Any) -> tuple[object, ...]:
    request_id = message.request.request_id if isinstance(message, PrefillRequest) else message.request_id
    return type(message), request_id, message.attempt


class _RecordingCosts:
    def __init__(self) -> None:
        self.latest = IterationWork()

    def iteration_s(self, work: IterationWork) -> float:
        self.latest = work.copy()
        return 0.0

    def swap_s(self, num_tokens: float) -> float:
        return 0.0


class _UnknownAnswers(dict[RequestId, SimulatedAnswer]):
    def __missing__(self, request_id: RequestId) -> SimulatedAnswer:
        return _ENDLESS
