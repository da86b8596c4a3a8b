"""The answer to `explain`: a call's course as JSON, times in milliseconds since it was received.

A request's course as phases that follow one another without a gap: each begins with a step of it."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import orjson

from alignedserve.api.timelines.timeline import GATEWAY, ChoiceObjective, ChoiceTimeline, SourcedNote, Timeline
from alignedserve.core.ids import RequestId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.request_notes import (
    MAX_DOCUMENT_BYTES,
    MAX_STANDINGS,
    AskStandings,
    Cause,
    Standing,
    StandingsTold,
    Step,
)
from alignedserve.messages.wire import Message


class PhaseName(Enum):
    """A stretch of work on a request, or of its waiting."""

    TOKENISE = "tokenise"  # body read and checked, template, tokens, grammar
    TO_ROUTER = "to router"
    ROUTER_QUEUE = "router queue"
    TO_WORKER = "to worker"
    WORKER_QUEUE = "worker queue"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    POOL = "pool"
    TO_BATCH = "to batch"  # granted by the pool, not yet at the decode worker
    PREFETCH = "prefetch"  # a candidate there: prefetched, then loaded when it may join
    DECODE = "decode"
    EVICTED = "evicted"
    RESUME = "resume"  # its holder is lost: it is queued again
    STREAM_END = "stream end"
    NOT_KEPT = "not kept"  # of more steps than are kept: what happened is not known


# Phases in which nothing is computed for the request.
WAITS = frozenset(
    {
        *(PhaseName.ROUTER_QUEUE, PhaseName.WORKER_QUEUE, PhaseName.POOL, PhaseName.PREFETCH),
        *(PhaseName.HANDOFF, PhaseName.EVICTED, PhaseName.RESUME),
    }
)
_BEGINS = {
    Step.RECEIVED: PhaseName.TOKENISE,
    Step.SUBMITTED: PhaseName.TO_ROUTER,
    Step.QUEUED: PhaseName.ROUTER_QUEUE,
    Step.PREEMPTED: PhaseName.ROUTER_QUEUE,
    Step.DISPATCHED: PhaseName.TO_WORKER,
    Step.INTERRUPTED: PhaseName.RESUME,
    Step.ACCEPTED: PhaseName.WORKER_QUEUE,
    Step.STARTED: PhaseName.PREFILL,
    Step.PREFILLED: PhaseName.HANDOFF,
    Step.POOLED: PhaseName.POOL,
    Step.RETURNED: PhaseName.POOL,
    Step.GRANTED: PhaseName.TO_BATCH,
    Step.ARRIVED: PhaseName.PREFETCH,
    Step.JOINED: PhaseName.DECODE,
    Step.MOVED: PhaseName.DECODE,
    Step.SWAPPED_IN: PhaseName.DECODE,
    Step.EVICTED: PhaseName.EVICTED,
    Step.SWAPPED_OUT: PhaseName.EVICTED,
    Step.FINISHED: PhaseName.STREAM_END,
}
# Of waits so short that no tick told another: rooms look at what waits four times a second.
_USUAL_CAUSES = {
    PhaseName.WORKER_QUEUE: [Cause.ITERATION],
    PhaseName.HANDOFF: [Cause.COPY],
    PhaseName.PREFETCH: [Cause.PREFETCH],
}


@dataclass(slots=True)
class RequestPhase:
    """A part of a request's time, and what was noted meanwhile."""

    name: PhaseName
    source: str  # the process that it is at; GATEWAY: this one
    start_s: float
    end_s: float
    notes: list[SourcedNote] = field(default_factory=list)

    @property
    def causes(self) -> list[Cause]:
        """The causes noted in it, each once, in order; of a wait without any the usual one."""
        noted = list(dict.fromkeys(sourced.note.cause for sourced in self.notes if sourced.note.cause is not None))
        return noted or _USUAL_CAUSES.get(self.name, [])


def notes_of(choice: ChoiceTimeline) -> list[SourcedNote]:
    """Return a choice's notes in order of time; of one time, as they came."""
    return sorted(choice.notes, key=lambda sourced: sourced.note.at_s)


def phases_of(choice: ChoiceTimeline, now: float) -> list[RequestPhase]:
    """Return the phases of a choice, up to its end or to now; phases without duration are left out."""
    phases = _phases(notes_of(choice), now if choice.ended_s is None else choice.ended_s)
    return [part for phase in phases for part in _known_parts(phase, choice) if part.end_s > part.start_s]


def _known_parts(phase: RequestPhase, choice: ChoiceTimeline) -> Iterator[RequestPhase]:
    missing_s = choice.missing_since_s
    if missing_s is None or not phase.start_s <= missing_s < phase.end_s:
        yield phase
        return
    yield replace(phase, end_s=missing_s)
    yield RequestPhase(PhaseName.NOT_KEPT, phase.source, missing_s, phase.end_s)


def _phases(notes: Sequence[SourcedNote], end_s: float) -> Iterator[RequestPhase]:
    phase: RequestPhase | None = None
    is_move = False  # whether the phase is the handoff of a request that was decoded before
    for sourced in notes:
        at_s, begins = min(sourced.note.at_s, end_s), _begun_by(sourced, phase, is_move=is_move)
        if begins is not None and (phase is None or begins != (phase.name, phase.source)):
            if phase is not None:
                phase.end_s = at_s
                yield phase
            is_move = phase is not None and (phase.name, begins[0]) == (PhaseName.DECODE, PhaseName.HANDOFF)
            phase = RequestPhase(*begins, at_s, end_s)
        if phase is not None:
            phase.notes.append(sourced)
    if phase is not None:
        yield phase


def _begun_by(sourced: SourcedNote, phase: RequestPhase | None, *, is_move: bool) -> tuple[PhaseName, str] | None:
    """Return the phase that a step begins, and where it is; None: it belongs to the one before. A request that is to
    move is decoded until its cache is written, and again where it stays."""
    step = sourced.note.step
    if phase is not None and step is Step.HANDED_OVER and phase.name is PhaseName.DECODE:
        return PhaseName.HANDOFF, phase.source
    if phase is not None and is_move and step in (Step.HANDOFF_REFUSED, Step.STAYED):
        return PhaseName.DECODE, phase.source
    name = _BEGINS.get(step)
    return None if name is None else (name, _place(sourced))


def _place(sourced: SourcedNote) -> str:
    if sourced.note.step is Step.MOVED and sourced.note.peer:
        return sourced.note.peer
    return GATEWAY if sourced.note.step is Step.FINISHED else sourced.source


def end_of(timeline: Timeline) -> float:
    assert timeline.ended_s is not None, "a call that goes on"
    return timeline.ended_s


def num_spans(timeline: Timeline) -> int:
    """Return how many spans a call has that has ended: its own, and those of its phases and of several choices."""
    num_phases = sum(len(phases_of(choice, end_of(timeline))) for choice in timeline.choices)
    return 1 + num_phases + (len(timeline.choices) if len(timeline.choices) > 1 else 0)


_SHORT_EVENTS = 32  # of a choice, where the whole would be too large

# With the fields of a note by their names.
_STEPS = {
    Step.RECEIVED: "received",
    Step.SUBMITTED: "tokenised and sent to the router",
    Step.FIRST_TOKEN: "first token sent to the client",
    Step.RESUMED: "sent to the router again, with the tokens that the client has",
    Step.ENDED: "ended after {num_tokens} tokens",
    Step.QUEUED: "queued: {num_requests} before it, {num_tokens} tokens of other prompts wait",
    Step.WAITING: "still waiting",
    Step.DISPATCHED: "given to {peer}: {num_tokens} tokens of context, an answer of about {predicted_len} expected",
    Step.PREDICTED: "length of the answer predicted: {predicted_len}",
    Step.POOLED: "in {peer} with {num_tokens} tokens of context",
    Step.GRANTED: "granted to {peer} in a batch of {num_requests}",
    Step.MOVE_ORDERED: "to be moved to {peer}",
    Step.MOVED: "moved to {peer} after {num_tokens} tokens",
    Step.STAYED: "not moved: it goes on at {peer}",
    Step.PREEMPTED: "sent back to the queue by {peer} after {num_tokens} tokens",
    Step.INTERRUPTED: "taken from its worker",
    Step.ACCEPTED: "accepted with {num_tokens} tokens of context; other requests here: {num_requests}",
    Step.STARTED: "computing begins: {num_tokens} tokens cached already, in an iteration of {num_requests}",
    Step.STOOD_STILL: "the pass of {num_requests} others stands still",
    Step.PREFILLED: "prompt computed ({num_tokens} tokens), first token sampled",
    Step.WENT_ON: "that pass has gone on, and ends",
    Step.OFFERED: "asks {peer} for blocks",
    Step.HANDED_OVER: "cache written to {peer}",
    Step.HANDOFF_REFUSED: "{peer} took nothing",
    Step.ARRIVED: "candidate in a batch of {num_requests}, from {peer}",
    Step.PREFETCHING: "prefetch into the memory of {peer} begins",
    Step.PREFETCHED: "prefetched into the memory of {peer}",
    Step.PREFETCH_ENDED: "prefetch ended without a copy",
    Step.LOADING: "cache copied in from {peer}",
    Step.JOINED: "in the running batch{of_requests}",
    Step.EVICTED: "evicted",
    Step.SWAPPED_OUT: "cache of {num_tokens} tokens swapped out to host memory",
    Step.SWAPPED_IN: "cache of {num_tokens} tokens swapped in again",
    Step.RETURNED: "returned to the pool by way of {peer}",
    Step.FINISHED: "last of {num_tokens} tokens: {num_iterations} iterations of {num_requests} on average",
    Step.ATTEMPT_FAILED: "this attempt failed",
}
_CAUSES = {
    Cause.NO_WORKER: "no worker takes prompts",
    Cause.WORKERS_BUSY: "every worker had as many prompt tokens to compute as it may be given",
    Cause.POOL_FULL: "the pool had no free blocks",
    Cause.OTHERS_FIRST: "requests of higher class or priority, or with less slack, had the iterations",
    Cause.BLOCKS_SHORT: "too few cache blocks were free",
    Cause.BATCH_FULL: "as many requests ran as may run together",
    Cause.BATCH_NOT_FULL: "too few requests of similar length for an aligned batch",
    Cause.NO_SLOT: "every decode worker had all the requests that it takes",
    Cause.EARLIER_BATCH: "an earlier batch ran on before its own could take over",
    Cause.PREFETCH: "its cache was on its way",
    Cause.PREFIX: "its prefix was on its way from a pool",
    Cause.BLOCKS_HELD: "blocks were held for requests that move",
    Cause.ITERATION: "the iteration that ran had to end first",
    Cause.COPY: "its cache was being handed over",
    Cause.MEMORY: "others needed its cache blocks",
    Cause.REFUSED: "its cache did not verify, or found no room",
    Cause.WORKER_LOST: "its worker was lost",
    Cause.DRAINED: "its worker drains",
    Cause.WITHIN: "within the pass in flight, which stops between two layers for it",
    Cause.URGENT: "urgent: past the pool, straight to a decode worker",
    Cause.CLIENT_GONE: "the client was gone",
    Cause.FAILED: "it failed",
    Cause.REJECTED: "it was rejected",
    Cause.STOP_STRING: "a stop string came",
}


def explanation_json(timeline: Timeline, gateway: str, now: float) -> bytes:
    """Return the explanation, at most as large as a message may carry: else with fewer events, or without."""
    view = explanation(timeline, gateway, now)
    for num_events in (_SHORT_EVENTS, 0):
        document = orjson.dumps(view)
        if len(document) <= MAX_DOCUMENT_BYTES:
            return document
        for choice in view["choices"]:
            choice["events_left_out"] += len(choice["events"][num_events:])
            del choice["events"][num_events:]
    return orjson.dumps(view)


def explanation(timeline: Timeline, gateway: str, now: float) -> dict[str, Any]:
    """Return a call's facts and the course of each choice. `gateway`: the name of the one that has it."""
    facts = timeline.facts
    return {
        "object": "alignedserve.request",
        "id": facts.response_id,
        "client_request_id": facts.client_id,
        "created": int(facts.received_unix_s),
        "model": facts.model,
        "service_tier": facts.service_tier,
        "gateway": gateway,
        "state": "running" if timeline.ended_s is None else "ended",
        "complete": timeline.is_complete(now),
        "prompt_tokens": facts.num_prompt_tokens,
        "trace_id": facts.trace.trace_id.hex() if facts.trace is not None else None,
        "choices": [_choice_view(index, choice, gateway, now) for index, choice in enumerate(timeline.choices)],
    }


def _choice_view(index: int, choice: ChoiceTimeline, gateway: str, now: float) -> dict[str, Any]:
    notes, start_s = notes_of(choice), choice.received_s
    return {
        "index": index,
        "request_id": choice.request_id,
        "class": choice.request_class,
        "priority": choice.priority,
        "prompt_tokens": choice.prompt_len,
        "max_tokens": choice.max_tokens,
        "finish_reason": choice.finish_reason or None,
        "output_tokens": choice.num_tokens if choice.ended_s is not None else None,
        "predicted_tokens": _predicted(notes),
        "cached_prompt_tokens": choice.num_cached_tokens,
        "ttft_ms": _ms(choice.first_token_s, start_s),
        "duration_ms": _ms(choice.ended_s, start_s),
        "objectives": [_objective_view(item) for item in choice.objectives(now)],
        "phases": [_phase_view(phase, gateway, start_s) for phase in phases_of(choice, now)],
        "events": [_event_view(item, gateway, start_s) for item in notes],
        "events_left_out": choice.num_left_out,
    }


def _predicted(notes: Sequence[SourcedNote]) -> float | None:
    predicted = [item.note.predicted_len for item in notes if item.note.predicted_len is not None]
    of_predictor = [item.note.predicted_len for item in notes if item.note.step is Step.PREDICTED]
    chosen = of_predictor or predicted
    return round(chosen[-1], 1) if chosen and chosen[-1] is not None else None


def _objective_view(objective: ChoiceObjective) -> dict[str, Any]:
    return {
        "name": objective.name,
        "target_ms": round(objective.target_s * 1e3, 3),
        "measured_ms": None if objective.measured_s is None else round(objective.measured_s * 1e3, 3),
        "held": objective.is_held,
    }


def _phase_view(phase: RequestPhase, gateway: str, start_s: float) -> dict[str, Any]:
    return {
        "name": phase.name.value,
        "where": phase.source or gateway,
        "start_ms": _ms(phase.start_s, start_s),
        "duration_ms": _ms(phase.end_s, phase.start_s),
        "is_wait": phase.name in WAITS,
        "reasons": [{"cause": cause.value, "text": cause_text(cause)} for cause in phase.causes],
    }


def _event_view(sourced: SourcedNote, gateway: str, start_s: float) -> dict[str, Any]:
    note = sourced.note
    view: dict[str, Any] = {
        "at_ms": _ms(note.at_s, start_s),
        "where": sourced.source or gateway,
        "step": note.step.value,
        "text": step_text(sourced),
    }
    if note.attempt:
        view["attempt"] = note.attempt
    if note.cause is not None:
        view["reason"] = {"cause": note.cause.value, "text": cause_text(note.cause)}
    return view


def _ms(at_s: float | None, since_s: float) -> float | None:
    return None if at_s is None else round((at_s - since_s) * 1e3, 3)


def step_text(sourced: SourcedNote) -> str:
    note = sourced.note
    predicted_len = "an unknown number" if note.predicted_len is None else f"{note.predicted_len:.0f}"
    return _STEPS[note.step].format(
        peer=note.peer or "another process",
        num_tokens=note.num_tokens,
        num_requests=note.num_requests,
        num_iterations=note.num_iterations,
        predicted_len=predicted_len,
        of_requests=f" of {note.num_requests}" if note.num_requests else "",
    )


def cause_text(cause: Cause) -> str:
    return _CAUSES[cause]


_ANSWER_S = 1.0  # a router that has not answered by then is not waited for
_UNKNOWN = "not known: no router tells of it at this moment"


class StandingQuestions:
    """Asks every connected router; each knows the requests of its deployment."""

    def __init__(self) -> None:
        self._open: dict[int, _Question] = {}
        self._numbers = itertools.count(1)

    async def ask(
        self, request_ids: tuple[RequestId, ...], ask_routers: Callable[[Message], int]
    ) -> dict[RequestId, Standing]:
        """Return the standings that routers tell in time. `ask_routers`: returns how many were asked."""
        number = next(self._numbers)
        question = self._open[number] = _Question(len(request_ids))
        try:
            question.asked(ask_routers(AskStandings(number, request_ids)))
            async with asyncio.timeout(_ANSWER_S):
                await question.is_answered.wait()
        except TimeoutError:
            pass
        finally:
            del self._open[number]
        return question.known

    def told(self, message: StandingsTold) -> None:
        question = self._open.get(message.number)
        if question is not None:
            question.told(message)


class _Question:
    def __init__(self, num_wanted: int) -> None:
        self.known: dict[RequestId, Standing] = {}
        self.is_answered = asyncio.Event()
        self._num_wanted = num_wanted
        self._num_asked: int | None = None
        self._num_answers = 0

    def asked(self, num_routers: int) -> None:
        self._num_asked = num_routers
        self._look()

    def told(self, message: StandingsTold) -> None:
        self.known.update((standing.request_id, standing) for standing in message.standings)
        self._num_answers += 1
        self._look()

    def _look(self) -> None:
        has_all = self._num_asked is not None and self._num_answers >= self._num_asked
        if has_all or len(self.known) >= self._num_wanted:
            self.is_answered.set()


def open_requests(document: Mapping[str, Any]) -> tuple[RequestId, ...]:
    """Return the requests of an explained call that go on; of many the first few, as each looks at the whole queue."""
    return tuple(choice["request_id"] for choice in document["choices"] if choice["output_tokens"] is None)[
        :MAX_STANDINGS
    ]


def add_standings(document: Mapping[str, Any], known: Mapping[RequestId, Standing]) -> None:
    """Add to each choice of an explained call where it stands; None: it has ended."""
    for choice in document["choices"]:
        is_open = choice["output_tokens"] is None
        choice["standing"] = standing_view(known.get(choice["request_id"])) if is_open else None


def standing_view(standing: Standing | None) -> dict[str, Any]:
    if standing is None:
        return {"stage": None, "where": None, "position": None, "start_in_ms": None, "text": _UNKNOWN}
    num_before = standing.num_before
    return {
        "stage": standing.stage.value,
        "where": standing.where or "router",
        "position": None if num_before is None else num_before + 1,
        "prompt_tokens_before": None if num_before is None else standing.num_tokens_before,
        "start_in_ms": _shown_ms(standing.start_s),
        "latest_start_in_ms": _shown_ms(standing.latest_start_s),
        "text": standing_text(standing),
    }


def standing_text(standing: Standing) -> str:
    where, others = standing.where or "another process", standing.num_others
    match standing.stage:
        case Stage.QUEUED if standing.num_before is None:
            return "about to be queued again; when it starts is not known"
        case Stage.QUEUED:
            position = (standing.num_before or 0) + 1
            queued = f"number {position} in the queue, {standing.num_tokens_before} prompt tokens before it"
            if standing.start_s is None:
                return f"{queued}; when it starts is not known: nothing has left the queue yet while others waited"
            expected, latest = f"{queued}; it is expected to start in {standing.start_s:.1f} s", standing.latest_start_s
            if latest is None or latest <= standing.start_s:
                return expected
            return f"{expected}, by its class's share in {latest:.1f} s if more real-time requests come"
        case Stage.PREFILLING:
            prompts = f"{others} other prompts of {standing.num_tokens_before} tokens"
            return f"at {where} with {prompts}; its policy chooses every iteration, so when it starts is not known"
        case Stage.POOLED:
            return f"in {where} with {others} others; it starts with a batch of its length, when is not known"
    return f"at {where} with {others} others that run, pause or wait for a place there"


def _shown_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)
