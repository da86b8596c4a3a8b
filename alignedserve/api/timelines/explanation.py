"""The answer to `explain`: a call's course as JSON, times in milliseconds since it was received."""

from collections.abc import Sequence
from typing import Any

import orjson

from alignedserve.api.timelines.phases import WAITS, Phase, notes_of, phases_of
from alignedserve.api.timelines.timeline import ChoiceTimeline, Objective, SourcedNote, Timeline
from alignedserve.messages.request_notes import MAX_DOCUMENT_BYTES, Cause, RequestNote, Step

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
        "objectives": [_objective_view(one) for one in choice.objectives(now)],
        "phases": [_phase_view(phase, gateway, start_s) for phase in phases_of(choice, now)],
        "events": [_event_view(one, gateway, start_s) for one in notes],
        "events_left_out": choice.num_left_out,
    }


def _predicted(notes: Sequence[SourcedNote]) -> float | None:
    predicted = [one.note.predicted_len for one in notes if one.note.predicted_len is not None]
    of_predictor = [one.note.predicted_len for one in notes if one.note.step is Step.PREDICTED]
    chosen = of_predictor or predicted
    return round(chosen[-1], 1) if chosen and chosen[-1] is not None else None


def _objective_view(one: Objective) -> dict[str, Any]:
    return {
        "name": one.name,
        "target_ms": round(one.target_s * 1e3, 3),
        "measured_ms": None if one.measured_s is None else round(one.measured_s * 1e3, 3),
        "held": one.is_held,
    }


def _phase_view(phase: Phase, gateway: str, start_s: float) -> dict[str, Any]:
    return {
        "name": phase.name.value,
        "where": phase.source or gateway,
        "start_ms": _ms(phase.start_s, start_s),
        "duration_ms": _ms(phase.end_s, phase.start_s),
        "is_wait": phase.name in WAITS,
        "reasons": [{"cause": cause.value, "text": cause_text(cause)} for cause in phase.causes],
    }


def _event_view(one: SourcedNote, gateway: str, start_s: float) -> dict[str, Any]:
    note = one.note
    view: dict[str, Any] = {
        "at_ms": _ms(note.at_s, start_s),
        "where": one.source or gateway,
        "step": note.step.value,
        "text": step_text(one),
    }
    if note.attempt:
        view["attempt"] = note.attempt
    if note.cause is not None:
        view["reason"] = {"cause": note.cause.value, "text": cause_text(note.cause)}
    return view


def _ms(at_s: float | None, since_s: float) -> float | None:
    return None if at_s is None else round((at_s - since_s) * 1e3, 3)


def step_text(one: SourcedNote) -> str:
    note = one.note
    predicted_len = "an unknown number" if note.predicted_len is None else f"{note.predicted_len:.0f}"
    return _STEPS[note.step].format(
        peer=note.peer or "another process",
        num_tokens=note.num_tokens,
        num_requests=note.num_requests,
        num_iterations=note.num_iterations,
        predicted_len=predicted_len,
        of_requests=_of_requests(note),
    )


def cause_text(cause: Cause) -> str:
    return _CAUSES[cause]


def _of_requests(note: RequestNote) -> str:
    return f" of {note.num_requests}" if note.num_requests else ""
