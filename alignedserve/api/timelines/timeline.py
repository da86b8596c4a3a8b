"""The courses of one gateway's calls: of each its facts and the course of each of its choices.

Open ones are kept, and ended ones for a while, bounded by count, bytes and age. Whoever asks changes nothing here."""

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from alignedserve.config.sections import ExplainConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request
from alignedserve.messages.request_notes import Cause, RequestNote, RequestsNoted, Step

REQUEST_ID_HEADER = "x-request-id"

_PLAIN_WORD = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)

# Versions to come may have more behind the flags; version ff is none.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.ASCII)
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}", re.ASCII)
_SAMPLED = 1
_RATIO_BITS = 56  # of a trace's id, which its makers are to choose at random


def plain_request_id(text: str | None) -> str | None:
    """Return the client's own id if it is a plain word, which may stand in headers, logs and answers; else None."""
    return text if text is not None and _PLAIN_WORD.fullmatch(text) else None


class TraceContext(NamedTuple):
    """Ids of a call's trace and of its first span."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes = b""  # of the client's span; empty: there is none
    state: str = ""  # the client's `tracestate`


def trace_of(headers: Mapping[str, str], ratio: float) -> TraceContext | None:
    """Return the trace of a call; None: it is not to be traced. A client's decision is followed; of the others as many
    are traced as the ratio says."""
    parent = _TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
    if parent is not None and int(parent[1], 16) and int(parent[2], 16):
        if not int(parent[3], 16) & _SAMPLED:
            return None
        state = headers.get("tracestate", "")
        known = state if _TRACESTATE.fullmatch(state) else ""
        return TraceContext(bytes.fromhex(parent[1]), secrets.token_bytes(8), bytes.fromhex(parent[2]), known)
    trace_id = secrets.token_bytes(16)
    if int.from_bytes(trace_id[-_RATIO_BITS // 8 :]) >= ratio * (1 << _RATIO_BITS):
        return None
    return TraceContext(trace_id, secrets.token_bytes(8))


GATEWAY = ""  # as the source of its own notes
_MAX_NOTES = 256  # of a choice; later ones are counted, but for those of its end
LAST_NOTES_S = 1.0  # after the end of a call, in which the last notes of every process come, each at its own next tick
_LAST_STEPS = (Step.FINISHED, Step.ENDED)
# Measured with tracemalloc, and rounded up (tests/gateway/timelines/test_timelines.py).
_FACTS_BYTES, _NOTE_BYTES = 3072, 512
_CHOICE_BYTES = 1024 + 4 * _NOTE_BYTES  # with the gateway's own notes


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known of a call when it is submitted. No text of it."""

    response_id: str
    http_id: str  # by the gateway
    client_id: str | None  # the client's own id
    owner: str  # of its key
    model: str
    service_tier: str
    num_prompt_tokens: int
    received_s: float  # monotonic
    received_unix_s: float
    trace: TraceContext | None = None  # None: it is not traced


class SourcedNote(NamedTuple):
    """A note and the process that it is from."""

    source: str
    note: RequestNote


class ChoiceObjective(NamedTuple):
    """An objective of a choice, and what came of it."""

    name: str
    target_s: float
    measured_s: float | None  # None: nothing yet
    is_held: bool | None


@dataclass(slots=True)
class ChoiceTimeline:
    """The course of one request to the cluster."""

    request_id: RequestId
    prompt_len: int
    max_tokens: int
    received_s: float
    request_class: str
    priority: int
    targets: tuple[tuple[str, float], ...]
    notes: list[SourcedNote] = field(default_factory=list)
    num_left_out: int = 0
    left_out_s: float | None = None  # time of the first note that was not kept
    first_token_s: float | None = None
    ended_s: float | None = None
    num_tokens: int = 0  # once it has ended
    num_cached_tokens: int = 0
    finish_reason: str = ""
    cause: Cause | None = None  # of its end

    def add(self, source: str, note: RequestNote) -> bool:
        if len(self.notes) >= _MAX_NOTES and note.step not in _LAST_STEPS:
            self.num_left_out += 1
            self.left_out_s = note.at_s if self.left_out_s is None else min(self.left_out_s, note.at_s)
            return False
        self.notes.append(SourcedNote(source, note))
        return True

    @property
    def missing_since_s(self) -> float | None:
        """Return the time from which on its steps are not known, but for those of its end; None: all are."""
        if self.left_out_s is None:
            return None
        times = (sourced.note.at_s for sourced in self.notes if sourced.note.step not in _LAST_STEPS)
        return max(self.left_out_s, max(times, default=0.0))

    def objectives(self, now: float) -> list[ChoiceObjective]:
        return [self._objective(name, target_s, now) for name, target_s in self.targets]

    def _objective(self, name: str, target_s: float, now: float) -> ChoiceObjective:
        measured_s = self._measured_s(name)
        if measured_s is not None:
            return ChoiceObjective(name, target_s, measured_s, measured_s <= target_s)
        is_missed = self._has_failed or (name != "tpot" and self._waited_s(now) > target_s)
        return ChoiceObjective(name, target_s, None, False if is_missed else None)

    @property
    def _has_failed(self) -> bool:
        return self.ended_s is not None and not self.finish_reason and self.cause is not Cause.CLIENT_GONE

    def _waited_s(self, now: float) -> float:
        return (now if self.ended_s is None else self.ended_s) - self.received_s

    def _measured_s(self, name: str) -> float | None:
        if name == "ttft":
            return None if self.first_token_s is None else self.first_token_s - self.received_s
        if self.ended_s is None or not self.finish_reason:
            return None
        if name == "deadline":
            return self.ended_s - self.received_s
        if self.first_token_s is None or self.num_tokens < 2:
            return 0.0
        return (self.ended_s - self.first_token_s) / (self.num_tokens - 1)


class Timeline:
    """The course of one call. The generation tells it what the gateway sees; the rest comes from the rooms."""

    def __init__(self, facts: CallFacts, requests: Iterable[Request]) -> None:
        self.facts = facts
        self.choices = [_choice_of(request, facts.received_s) for request in requests]
        self.num_bytes = _FACTS_BYTES + len(self.choices) * _CHOICE_BYTES
        self.ended_s: float | None = None

    @property
    def ids(self) -> set[str]:
        ids = {self.facts.response_id, self.facts.http_id, self.facts.client_id or self.facts.http_id}
        return ids | {choice.request_id for choice in self.choices}

    def is_complete(self, now: float) -> bool:
        return self.ended_s is not None and now - self.ended_s >= LAST_NOTES_S

    def add(self, choice: ChoiceTimeline, source: str, note: RequestNote) -> int:
        num_bytes = _NOTE_BYTES if choice.add(source, note) else 0
        self.num_bytes += num_bytes
        return num_bytes

    def mark(self, index: int, step: Step, now: float, *, cause: Cause | None = None, num_tokens: int = 0) -> None:
        choice = self.choices[index]
        choice.add(GATEWAY, RequestNote(choice.request_id, step, now, cause=cause, num_tokens=num_tokens))

    def received(self, submitted_s: float) -> None:
        for index in range(len(self.choices)):
            self.mark(index, Step.RECEIVED, self.facts.received_s)
            self.mark(index, Step.SUBMITTED, submitted_s)

    def first_token(self, index: int, now: float, num_cached_tokens: int) -> None:
        choice = self.choices[index]
        choice.first_token_s, choice.num_cached_tokens = now, num_cached_tokens
        self.mark(index, Step.FIRST_TOKEN, now)

    def choice_ended(
        self, index: int, now: float, *, num_tokens: int, finish_reason: str = "", cause: Cause | None = None
    ) -> None:
        """Note the end of a choice: with a reason to finish, or else with the cause of its failure."""
        choice = self.choices[index]
        if choice.ended_s is None:
            choice.ended_s, choice.num_tokens = now, num_tokens
            choice.finish_reason, choice.cause = finish_reason, cause
            self.mark(index, Step.ENDED, now, cause=cause, num_tokens=num_tokens)


def _choice_of(request: Request, received_s: float) -> ChoiceTimeline:
    return ChoiceTimeline(
        request.request_id,
        request.prompt_len,
        request.sampling.max_tokens,
        received_s,
        request.request_class.value,
        request.priority,
        request.slo.targets,
    )


class Timelines:
    """Finds the course of a request by its id; of a call by its response's, the client's own or its choices'."""

    def __init__(
        self,
        config: ExplainConfig,
        *,
        traced_ratio: float | None = None,
        trace: Callable[[Timeline], None] | None = None,
    ) -> None:
        """`traced_ratio`: of calls; None: none are. `trace`: gets each that is, at its end."""
        self._config = config
        self._keep_s = config.keep_s if config.enabled else 2 * LAST_NOTES_S
        self._traced_ratio = traced_ratio
        self._trace = trace
        self._open: dict[str, Timeline] = {}  # by response id, like the next
        self._ended: dict[str, Timeline] = {}  # the one that ended first comes first
        self._by_request: dict[RequestId, tuple[Timeline, ChoiceTimeline]] = {}
        self._by_id: dict[tuple[str, str], Timeline] = {}  # by owner and any of its ids
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def trace_of(self, headers: Mapping[str, str]) -> TraceContext | None:
        """Return the trace of a call with these headers; None: it is not traced."""
        return None if self._traced_ratio is None else trace_of(headers, self._traced_ratio)

    def begin(self, facts: CallFacts, requests: Iterable[Request]) -> Timeline:
        """Keep a call that is submitted now. The same id may come again, as of a line that is tried again."""
        timeline = Timeline(facts, requests)
        now = time.monotonic()
        self._drop(self._open.get(facts.response_id) or self._ended.get(facts.response_id))
        self._open[facts.response_id] = timeline
        for choice in timeline.choices:
            self._by_request[choice.request_id] = timeline, choice
        for name in timeline.ids:
            self._by_id[facts.owner, name] = timeline
        timeline.received(now)
        self._num_bytes += timeline.num_bytes
        self._make_room(now)
        return timeline

    def end(self, timeline: Timeline) -> None:
        """Note that a call has ended: it is kept for a while, and traced."""
        now = timeline.ended_s = time.monotonic()
        response_id = timeline.facts.response_id
        if self._open.get(response_id) is timeline:
            self._ended[response_id] = self._open.pop(response_id)
        if self._trace is not None and timeline.facts.trace is not None:
            self._trace(timeline)
        self._make_room(now)

    def take(self, source: str, message: RequestsNoted) -> None:
        for note in message.notes:
            self._add(source, note)

    def note(self, request_id: RequestId, step: Step) -> None:
        self._add(GATEWAY, RequestNote(request_id, step, time.monotonic()))

    def find(self, wanted: str, owner: str) -> Timeline | None:
        timeline = self._by_id.get((owner, wanted)) if self._config.enabled else None
        return None if timeline is None or self._is_old(timeline, time.monotonic()) else timeline

    def _add(self, source: str, note: RequestNote) -> None:
        known = self._by_request.get(note.request_id)
        if known is not None:
            timeline, choice = known
            self._num_bytes += timeline.add(choice, source, note)

    def _is_old(self, timeline: Timeline, now: float) -> bool:
        return timeline.ended_s is not None and now - timeline.ended_s > self._keep_s

    def _make_room(self, now: float) -> None:
        while len(self) and (self._is_over() or self._is_old(self._first(), now)):
            self._drop(self._first())

    def _is_over(self) -> bool:
        return len(self) > self._config.max_requests or self._num_bytes > self._config.max_bytes

    def _first(self) -> Timeline:
        return next(iter((self._ended or self._open).values()))

    def _drop(self, timeline: Timeline | None) -> None:
        if timeline is None:
            return
        for timelines in (self._open, self._ended):
            if timelines.get(timeline.facts.response_id) is timeline:
                del timelines[timeline.facts.response_id]
        self._num_bytes -= timeline.num_bytes
        for choice in timeline.choices:
            if self._by_request.get(choice.request_id, (None,))[0] is timeline:
                del self._by_request[choice.request_id]
        for name in timeline.ids:
            if self._by_id.get((timeline.facts.owner, name)) is timeline:
                del self._by_id[timeline.facts.owner, name]
