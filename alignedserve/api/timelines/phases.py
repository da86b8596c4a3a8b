"""A request's course as phases that follow one another without a gap: each begins with a step of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from alignedserve.api.timelines.timeline import GATEWAY, ChoiceTimeline, SourcedNote, Timeline
from alignedserve.messages.request_notes import Cause, Step


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
    """Return the phase that a step begins, and where it is; None: it belongs to the one before.

    A request that is to move is decoded until its cache is written, and again where it stays.
    """
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
