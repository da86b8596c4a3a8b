"""Spans of a call: one for the call, one for each phase of a choice, at the process it was at; and their sending."""

import logging
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue
from typing_extensions import override

from alignedserve.api.timelines.explanation import RequestPhase, end_of, phases_of
from alignedserve.api.timelines.timeline import GATEWAY, ChoiceTimeline, Timeline
from alignedserve.config.sections import TracingConfig
from alignedserve.messages.request_notes import Cause, RequestNote, Step

_OPERATIONS = {"cmpl": "text_completion", "embd": "embeddings"}  # by the beginnings of ids; all others are chats
_FAILURES = (Cause.FAILED, Cause.REJECTED)
_TRACES_PATH = "/v1/traces"
_WARN_EVERY_S = 60.0
_NS = 1e9
_SCOPE = InstrumentationScope("alignedserve")


class SpanSender:
    """Sends the spans of calls to the collector. Its methods block."""

    def __init__(self, config: TracingConfig, gateway: str, headers: Mapping[str, str]) -> None:
        assert config.endpoint is not None, "an exporter without a collector"
        self._session = session = requests.Session()
        session.trust_env = False  # neither proxies nor passwords of the user's files
        session.hooks["response"].append(_refuse_redirect)
        parts = urlsplit(config.endpoint)
        self._service_name = config.service_name
        self._gateway = gateway
        self._exporter = OTLPSpanExporter(
            parts._replace(path=parts.path if parts.path not in ("", "/") else _TRACES_PATH).geturl(),
            certificate_file=ssl.get_default_verify_paths().cafile,
            headers={**headers, "user-agent": "alignedserve"},
            timeout=config.timeout_s,
            session=session,
        )
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_OnceInAWhile(config.endpoint))

    def send(self, timelines: Sequence[Timeline]) -> tuple[int, bool]:
        """Send the spans of these calls; return how many there are, and whether the collector took them."""
        spans = [span for timeline in timelines for span in spans_of(timeline, self._resource)]
        return len(spans), self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._session.close()

    def _resource(self, source: str) -> Resource:
        return Resource({"service.name": self._service_name, "service.instance.id": source or self._gateway})


class _OnceInAWhile(logging.Filter):
    def __init__(self, endpoint: str) -> None:
        super().__init__()
        parts = urlsplit(endpoint)
        self._collector = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # without a password
        self._warned_s = -_WARN_EVERY_S

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR or time.monotonic() - self._warned_s < _WARN_EVERY_S:
            return False  # the SDK warns before each further try, and tells an error once it gives up
        self._warned_s = time.monotonic()
        record.msg, record.args = f"the collector {self._collector} takes no traces: {record.getMessage()}", ()
        return True


def _refuse_redirect(response: requests.Response, *_: object, **__: object) -> None:
    if 300 <= response.status_code < 400:
        response.close()  # the connection is not given back by itself, as nothing reads the answer
        raise requests.TooManyRedirects("the collector redirects")


def spans_of(timeline: Timeline, resource_of: Callable[[str], Resource]) -> Iterator[ReadableSpan]:
    """Yield every span of a traced call: one for the call, one for each phase of a choice, made after the fact. Names
    and `gen_ai.` attributes follow OpenTelemetry's conventions. Iterations are counted, not traced: a phase has its
    notes as events. `resource_of`: names the process of a span."""
    maker, end_s = _SpanMaker(timeline, resource_of), end_of(timeline)
    yield maker.call_span()
    for index, choice in enumerate(timeline.choices):
        parent: SpanContext | None = maker.call
        if len(timeline.choices) > 1:
            ended_s = end_s if choice.ended_s is None else choice.ended_s
            attributes = {"gen_ai.usage.output_tokens": choice.num_tokens}
            span = maker.span(f"choice {index}", GATEWAY, (choice.received_s, ended_s), attributes, parent)
            parent = span.get_span_context()
            yield span
        for phase in phases_of(choice, end_s):
            yield maker.phase_span(phase, parent)


class _SpanMaker:
    def __init__(self, timeline: Timeline, resource_of: Callable[[str], Resource]) -> None:
        trace = timeline.facts.trace
        assert trace is not None, "spans of a call that is not traced"
        self._timeline = timeline
        self._resource_of = resource_of
        self._trace_id = int.from_bytes(trace.trace_id)
        state = TraceState.from_header([trace.state]) if trace.state else None
        self.call = self._context(trace.span_id, state=state)
        self._caller = self._context(trace.parent_id, is_remote=True) if trace.parent_id else None

    def call_span(self) -> ReadableSpan:
        timeline, facts = self._timeline, self._timeline.facts
        operation = _OPERATIONS.get(facts.response_id.partition("-")[0], "chat")
        attributes = _call_attributes(timeline, operation)
        failures = [cause for choice in timeline.choices if (cause := _failure_of(choice)) is not None]
        if failures:
            attributes["error.type"] = failures[0].value
        status = Status(StatusCode.ERROR, failures[0].value) if failures else Status()
        period = (facts.received_s, end_of(timeline))
        name, more = f"{operation} {facts.model}", {"kind": SpanKind.SERVER, "status": status}
        return self.span(name, GATEWAY, period, attributes, self._caller, context=self.call, **more)

    def phase_span(self, phase: RequestPhase, parent: SpanContext | None) -> ReadableSpan:
        attributes = _counts(phase.notes[0].note)
        if phase.causes:
            attributes["alignedserve.reasons"] = [cause.value for cause in phase.causes]
        events = [self._event(sourced.note) for sourced in phase.notes[1:]]
        return self.span(
            phase.name.value, phase.source, (phase.start_s, phase.end_s), attributes, parent, events=events
        )

    def span(
        self,
        name: str,
        source: str,
        period: tuple[float, float],
        attributes: Mapping[str, AttributeValue],
        parent: SpanContext | None,
        *,
        context: SpanContext | None = None,
        **more: Any,
    ) -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=context or self._context(secrets.token_bytes(8)),
            parent=parent,
            resource=self._resource_of(source),
            attributes=attributes,
            instrumentation_scope=_SCOPE,
            start_time=self._ns(period[0]),
            end_time=self._ns(period[1]),
            **more,
        )

    def _event(self, note: RequestNote) -> Event:
        attributes = _counts(note)
        if note.cause is not None:
            attributes["alignedserve.reason"] = note.cause.value
        return Event(note.step.value, attributes, self._ns(note.at_s))

    def _context(self, span_id: bytes, *, is_remote: bool = False, state: TraceState | None = None) -> SpanContext:
        return SpanContext(self._trace_id, int.from_bytes(span_id), is_remote, TraceFlags(TraceFlags.SAMPLED), state)

    def _ns(self, at_s: float) -> int:
        facts = self._timeline.facts
        return int((facts.received_unix_s + at_s - facts.received_s) * _NS)


def _call_attributes(timeline: Timeline, operation: str) -> dict[str, AttributeValue]:
    facts, choices = timeline.facts, timeline.choices
    attributes: dict[str, AttributeValue] = {
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
    known = (one for choice in choices for one in choice.objectives(end_of(timeline)) if one.is_held is not None)
    for objective in known:
        name = f"alignedserve.objective.{objective.name}.held"
        attributes[name] = bool(objective.is_held) and bool(attributes.get(name, True))
    return attributes


def _counts(note: RequestNote) -> dict[str, AttributeValue]:
    values: dict[str, AttributeValue] = {
        "peer": note.peer,
        "tokens": note.num_tokens,
        "requests": note.num_requests,
        "iterations": note.num_iterations,
        "predicted_tokens": note.predicted_len or 0.0,
    }
    return {f"alignedserve.{name}": value for name, value in values.items() if value}


def _failure_of(choice: ChoiceTimeline) -> Cause | None:
    for sourced in reversed(choice.notes):
        if sourced.note.step is Step.ENDED:
            return sourced.note.cause if sourced.note.cause in _FAILURES else None
    return None
