"""Spans of a call in OTLP's own types: one for the call, one for each phase of a choice, at the process it was at.

Names and `gen_ai.` attributes follow OpenTelemetry's semantic conventions for generative AI. Iterations are counted,
not traced: a phase has its notes as events.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from alignedserve.api.timelines.phases import Phase, end_of, phases_of
from alignedserve.api.timelines.timeline import GATEWAY, ChoiceTimeline, SourcedNote, Timeline
from alignedserve.api.timelines.trace_context import TraceContext
from alignedserve.messages.request_notes import Cause, RequestNote, Step

_Value = str | int | float | bool | Sequence[str]
_OPERATIONS = {"cmpl": "text_completion", "embd": "embeddings"}  # by the beginnings of ids; all others are chats
_FAILURES = (Cause.FAILED, Cause.REJECTED)
_NS = 1e9
_SCOPE = InstrumentationScope(name="alignedserve")


class Origin(NamedTuple):
    """The names that spans are sent under."""

    service_name: str
    gateway: str


class _Clock(NamedTuple):
    """Turns times of this process's monotonic clock into Unix time: by the arrival of the call, whatever came since."""

    received_s: float
    received_unix_s: float

    def ns(self, at_s: float) -> int:
        """Return a time in nanoseconds of Unix time."""
        return int((self.received_unix_s + at_s - self.received_s) * _NS)


def export_of(timelines: Sequence[Timeline], origin: Origin) -> tuple[ExportTraceServiceRequest, int]:
    """Return the message that carries the spans of these calls, and how many there are."""
    by_source: dict[str, list[Span]] = {}
    for timeline in timelines:
        for source, span in spans_of(timeline):
            by_source.setdefault(source or origin.gateway, []).append(span)
    resources = [
        ResourceSpans(resource=_resource(origin, source), scope_spans=[ScopeSpans(scope=_SCOPE, spans=spans)])
        for source, spans in by_source.items()
    ]
    return ExportTraceServiceRequest(resource_spans=resources), sum(map(len, by_source.values()))


def spans_of(timeline: Timeline) -> Iterator[tuple[str, Span]]:
    """Yield every span with the process that it is from. The call must be traced."""
    facts = timeline.facts
    trace = facts.trace
    assert trace is not None, "spans of a call that is not traced"
    clock = _Clock(facts.received_s, facts.received_unix_s)
    yield GATEWAY, _call_span(timeline, trace, clock)
    for index, choice in enumerate(timeline.choices):
        parent_id = trace.span_id
        if len(timeline.choices) > 1:
            span = _choice_span(index, choice, end_of(timeline), trace, clock)
            parent_id = span.span_id
            yield GATEWAY, span
        for phase in phases_of(choice, end_of(timeline)):
            yield phase.source, _phase_span(phase, trace, parent_id, clock)


def _call_span(timeline: Timeline, trace: TraceContext, clock: _Clock) -> Span:
    facts, choices = timeline.facts, timeline.choices
    operation = _OPERATIONS.get(facts.response_id.partition("-")[0], "chat")
    attributes: dict[str, _Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "alignedserve",
        "gen_ai.request.model": facts.model,
        "gen_ai.response.model": facts.model,
        "gen_ai.response.id": facts.response_id,
        "gen_ai.request.max_tokens": max(choice.max_tokens for choice in choices),
        "gen_ai.request.choice.count": len(choices),
        "gen_ai.usage.input_tokens": facts.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(choice.num_tokens for choice in choices),
        "gen_ai.response.finish_reasons": [choice.finish_reason or "error" for choice in choices],
        "http.request.header.x-request-id": [facts.client_id or facts.http_id],
        "alignedserve.service_tier": facts.service_tier,
    }
    for objective in (one for choice in choices for one in choice.objectives() if one.is_held is not None):
        name = f"alignedserve.objective.{objective.name}.held"
        attributes[name] = bool(objective.is_held) and bool(attributes.get(name, True))
    failures = [cause for choice in choices if (cause := _failure_of(choice)) is not None]
    if failures:
        attributes["error.type"] = failures[0].value
    return Span(
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        parent_span_id=trace.parent_id,
        trace_state=trace.state,
        name=f"{operation} {facts.model}",
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=clock.ns(facts.received_s),
        end_time_unix_nano=clock.ns(end_of(timeline)),
        attributes=_attributes(attributes),
        status=Status(code=Status.STATUS_CODE_ERROR, message=failures[0].value) if failures else None,
    )


def _choice_span(index: int, choice: ChoiceTimeline, end_s: float, trace: TraceContext, clock: _Clock) -> Span:
    return Span(
        trace_id=trace.trace_id,
        span_id=secrets.token_bytes(8),
        parent_span_id=trace.span_id,
        name=f"choice {index}",
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=clock.ns(choice.received_s),
        end_time_unix_nano=clock.ns(end_s if choice.ended_s is None else choice.ended_s),
        attributes=_attributes({"gen_ai.usage.output_tokens": choice.num_tokens}),
    )


def _phase_span(phase: Phase, trace: TraceContext, parent_id: bytes, clock: _Clock) -> Span:
    attributes: dict[str, _Value] = {}
    if phase.causes:
        attributes["alignedserve.reasons"] = [cause.value for cause in phase.causes]
    for name, value in _counts(phase.notes[0].note).items():
        attributes[f"alignedserve.{name}"] = value
    return Span(
        trace_id=trace.trace_id,
        span_id=secrets.token_bytes(8),
        parent_span_id=parent_id,
        name=phase.name.value,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=clock.ns(phase.start_s),
        end_time_unix_nano=clock.ns(phase.end_s),
        attributes=_attributes(attributes),
        events=[_event(one, clock) for one in phase.notes[1:]],
    )


def _event(one: SourcedNote, clock: _Clock) -> Span.Event:
    note = one.note
    attributes: dict[str, _Value] = {f"alignedserve.{name}": value for name, value in _counts(note).items()}
    if note.cause is not None:
        attributes["alignedserve.reason"] = note.cause.value
    at_ns = clock.ns(note.at_s)
    return Span.Event(name=note.step.value, time_unix_nano=at_ns, attributes=_attributes(attributes))


def _counts(note: RequestNote) -> dict[str, _Value]:
    values: dict[str, _Value] = {
        "peer": note.peer,
        "tokens": note.num_tokens,
        "requests": note.num_requests,
        "iterations": note.num_iterations,
        "predicted_tokens": note.predicted_len or 0.0,
    }
    return {name: value for name, value in values.items() if value}


def _failure_of(choice: ChoiceTimeline) -> Cause | None:
    for one in reversed(choice.notes):
        if one.note.step is Step.ENDED:
            return one.note.cause if one.note.cause in _FAILURES else None
    return None


def _resource(origin: Origin, source: str) -> Resource:
    names = {"service.name": origin.service_name, "service.instance.id": source}
    return Resource(attributes=_attributes(names))


def _attributes(values: Mapping[str, _Value]) -> list[KeyValue]:
    return [KeyValue(key=name, value=_value(value)) for name, value in values.items()]


def _value(value: _Value) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=one) for one in value]))
