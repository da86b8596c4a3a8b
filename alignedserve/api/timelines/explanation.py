"""The answer to `explain`: a call's course as JSON, times in milliseconds since it was received."""

from collections.abc import Sequence
from typing import Any

import orjson

from alignedserve.api.timelines.phases import WAITS, Phase, notes_of, phases_of
from alignedserve.api.timelines.timeline import ChoiceTimeline, Objective, SourcedNote, Timeline
from alignedserve.api.timelines.words import cause_text, step_text
from alignedserve.messages.request_notes import MAX_DOCUMENT_BYTES, Step

_SHORT_EVENTS = 32  # of a choice, where the whole would be too large


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
        "objectives": [_objective_view(one) for one in choice.objectives()],
        "phases": [_phase_view(phase, gateway, start_s) for phase in phases_of(choice, now)],
        "events": [_event_view(one, gateway, start_s) for one in notes],
        "events_left_out": choice.num_left_out,
    }


def _predicted(notes: Sequence[SourcedNote]) -> float | None:
    """Return the length predicted last; the one that it was dispatched with counts as well."""
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
