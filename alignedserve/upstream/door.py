"""Serves the gateway's calls, and the lines of batches, by upstream servers: rights, limits, objectives, usage, courses
of requests and metrics are those of every gateway."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from alignedserve.api.anthropic.message_format import anthropic_error_body
from alignedserve.api.backend.interface import ReadinessProbe, RequestStream
from alignedserve.api.errors import (
    GenerationError,
    Loop,
    Overloaded,
    TimedOut,
    Unavailable,
    error_body,
    http_error_of,
    refuse,
)
from alignedserve.api.models.model_registry import RegisteredModel, is_usable, usable_model
from alignedserve.api.models.model_services import ModelCard, ModelServices
from alignedserve.api.openai.generation import Pace, call_facts, cause_of
from alignedserve.api.openai.request_builder import (
    DEADLINE_HEADER,
    SERVICE_TIERS,
    TPOT_HEADER,
    TTFT_HEADER,
    Arrival,
    CallTerms,
)
from alignedserve.api.services import ApiServices
from alignedserve.api.timelines.timeline import REQUEST_ID_HEADER, Timeline
from alignedserve.batches.interfaces import (
    ClusterTotals,
    LineFailed,
    LineRejected,
    LineRequest,
    LineResponse,
    ModelState,
)
from alignedserve.batches.records import Endpoint, client_of
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import AlignedServeError, InvalidRequest, ModelError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import MAX_PRIORITY, Request, RequestClass, SamplingParams, Slo
from alignedserve.gateway.call import Call
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.routes.request_bodies import parsed, receive
from alignedserve.gateway.streaming import EventSender, failure_event, while_connected
from alignedserve.messages.cluster_view import TierLoad, WorkerSpeed
from alignedserve.messages.gateways import ClusterStatus
from alignedserve.messages.request_notes import RequestNote, RequestsNoted, Step
from alignedserve.text.tokenizer import Tokenizer, TokenizerOnUse
from alignedserve.upstream import logic as deciding
from alignedserve.upstream.dialect import LOOP_HEADER, AnswerUsage, beginnings_of, prompt_of
from alignedserve.upstream.logic import CHAT, DOCUMENT
from alignedserve.upstream.proxy import PassedCall, UpstreamProxy
from alignedserve.usage.records import BEST_EFFORT, REAL_TIME, UsageCounts, UsageSubject

_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_LIKELY_ANSWER, _MOST_ANSWER = 256, 1 << 20
_UNKNOWN_LENGTH = 1 << 20  # of a context of which the upstream says nothing
_MAX_DOORS_LEN = 1024
_CLASSES = {CHAT: REAL_TIME, DOCUMENT: BEST_EFFORT}
_PASSED = (TTFT_HEADER, TPOT_HEADER, DEADLINE_HEADER, "traceparent", "anthropic-version", "anthropic-beta")
_STATEFUL = ("background", "previous_response_id", "conversation")


@dataclass(frozen=True, slots=True)
class _Terms:
    """A body's tier and priority."""

    service_tier: str
    priority: int | None
    cache_salt: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "_Terms":
        """Return the terms of any API's body. Raises InvalidRequest."""
        tier, priority = fields.get("service_tier") or "auto", fields.get("priority")
        tier = "default" if tier == "standard_only" else tier
        if tier not in SERVICE_TIERS:
            refuse("service_tier", f"it is one of {', '.join(SERVICE_TIERS)}")
        is_number = isinstance(priority, int) and not isinstance(priority, bool) and abs(priority) <= MAX_PRIORITY
        if priority is not None and not is_number:
            refuse("priority", f"it is a number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        return cls(tier, priority)


class UpstreamBackend:
    """What the gateway's pages and metrics ask of a model's backend."""

    def __init__(self, proxy: UpstreamProxy, model: str) -> None:
        self._proxy = proxy
        self._model = model

    def submit(self, request: Request) -> RequestStream:
        """Raise Unavailable: calls are passed on whole."""
        raise Unavailable("This model is behind an upstream server.")

    def abort(self, request_id: RequestId) -> None:
        """Do nothing: there is nothing here."""

    def status(self) -> ClusterStatus | None:
        """Return what the upstreams of this model hold; None: none answers."""
        logic, serving = self._proxy.logic, self._proxy.logic.serving(self._model)
        if not serving:
            return None
        ttft_s, gap_s = self._proxy.idle_s
        return ClusterStatus(
            num_queued=logic.num_waiting(self._model, CHAT) + logic.num_waiting(self._model, DOCUMENT),
            num_decoding=sum(len(item.calls) for item in serving),
            num_prefill_workers=len(serving),
            num_decode_workers=len(serving),
            num_places=self.num_places,
            real_time=self._tier(CHAT),
            best_effort=self._tier(DOCUMENT),
            speed=WorkerSpeed(ttft_s, ttft_s, gap_s, gap_s),
        )

    @property
    def num_places(self) -> int:
        """Return how many documents the upstreams may have now, one at least."""
        return max(1, int(sum(item.documents.limit for item in self._proxy.logic.serving(self._model))))

    def num_answers(self) -> Mapping[str, int]:
        return {item.url: item.num_answered for item in self._proxy.logic.serving(self._model)}

    def _tier(self, kind: RequestClass) -> TierLoad:
        logic = self._proxy.logic
        num_open = sum(item.num_open(kind) for item in logic.serving(self._model))
        return TierLoad(num_queued=logic.num_waiting(self._model, kind), num_decoding=num_open)


class _Answers(ReadinessProbe):
    """A model is ready while an upstream of it answers."""

    def __init__(self, backend: UpstreamBackend) -> None:
        super().__init__(backend, token_id=0, reply_to="")
        self._of = backend

    @override
    def missing(self) -> str | None:
        return "no upstream server of it answers" if self._of.status() is None else None


class Course:
    """Measures, counts and explains one call."""

    def __init__(self, job: PassedCall, request: Request, model: ModelServices, arrival: Arrival) -> None:
        self.job = job
        self.is_complete = False
        self._request = request
        self._model = model
        self._arrival = arrival
        self._timeline: Timeline | None = None
        self._pace = Pace(request, model.metrics)
        job.on_first, job.on_placed = self._on_first, self._on_placed

    def __enter__(self) -> "Course":
        request, model, arrival = self._request, self._model, self._arrival
        model.limiter.acquire(request.request_class, 1)
        tier = "flex" if request.request_class is DOCUMENT else "default"
        facts = call_facts(arrival, arrival.request_id, tier, request.prompt_len, model)
        self._timeline = model.timelines.begin(facts, (request,))
        self._note("door", Step.QUEUED)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        request, usage, metrics, now = self._request, self.job.usage, self._model.metrics, time.monotonic()
        self._model.limiter.release(request.request_class, 1)
        assert self._timeline is not None, "a course without a beginning"
        num_tokens, cause = usage.output_tokens, None if error is None else cause_of(error)
        reason = "stop" if error is None else ""
        self._timeline.choice_ended(0, now, num_tokens=num_tokens, finish_reason=reason, cause=cause)
        self._model.timelines.end(self._timeline)
        self._pace.num_tokens, self._pace.last_s = num_tokens, now
        if error is None:
            metrics.tbt_s.num_tokens += num_tokens
            metrics.count_request((request,), num_tokens)
            self._pace.count_finished("stop")
        else:
            self._pace.count_unfinished(error)
            if self._pace.first_s is None:
                return
        if not self._arrival.is_line:
            subject = UsageSubject(self._arrival.key.name, self._model.model.name, _CLASSES[request.request_class])
            counts = UsageCounts(1, usage.prompt_tokens, usage.cached_tokens, num_tokens, 0)
            self._model.usage.add(subject, counts)

    def _on_placed(self, url: str) -> None:
        self._note("door", Step.DISPATCHED, url)
        self._note(url, Step.STARTED)

    def _on_first(self, now: float) -> None:
        num_cached = min(self.job.usage.cached_tokens, self._request.prompt_len)
        self._pace.begin(now, num_cached)
        assert self._timeline is not None, "a course without a beginning"
        self._timeline.first_token(0, now, num_cached)
        self._note(self.job.call.url or "", Step.JOINED)

    def _note(self, source: str, step: Step, peer: str = "") -> None:
        note = RequestNote(self._request.request_id, step, time.monotonic(), peer=peer)
        self._model.timelines.take(source, RequestsNoted((note,)))


class Door:
    """Answers calls of the gateway, and keeps its registry of models as the upstreams list them."""

    def __init__(self, urls: Sequence[str], config: GatewayConfig, key: str | None) -> None:
        """`key`: that the upstreams want; None: none."""
        self.proxy = UpstreamProxy(deciding.UpstreamLogic(urls), config, key=key, on_models=self.show_models)
        self._services: ApiServices | None = None
        self._models: dict[str, ModelServices] = {}

    def attach(self, services: ApiServices) -> None:
        self._services = services
        self.show_models()

    def show_models(self) -> None:
        """Let requests name the models that the upstreams list."""
        services, names = self._services, self.proxy.logic.models
        if services is None:
            return
        services.models.is_complete = all(item.is_up or item.is_refused for item in self.proxy.logic.upstreams.values())
        for name in names:
            length = self.proxy.lengths.get(name, _UNKNOWN_LENGTH)
            if name not in self._models or self._models[name].model.max_context_len != length:
                self._models[name] = self._served(services, name, length)
        services.models.replace_all([RegisteredModel(self._models[name].model, self._models[name]) for name in names])

    def _served(self, services: ApiServices, name: str, length: int) -> ModelServices:
        backend, card = UpstreamBackend(self.proxy, name), ModelCard(name, Path(), length)
        services.metrics.remove_deployment(name)
        made = services.make_model(card, backend, TokenizerOnUse(_no_tokenizer), deployment_id=name)
        return replace(made, readiness_probe=_Answers(backend))

    # --- calls of clients

    async def answer(self, call: Call, path: str) -> Response:
        """Answer a call by an upstream. Raises InvalidRequest, GenerationError."""
        doors = call.http.headers.get(LOOP_HEADER, "")
        if self.proxy.door_id in doors.split(",") or len(doors) > _MAX_DOORS_LEN:
            raise Loop("The request came from this server: an upstream leads back to it.")
        raw = await receive(call)
        fields = await parsed(raw, call.services, lambda fields: fields)
        model = call.model(_name_of(fields))
        course = self.course(fields, path, model, call.arrival, doors)
        request = course.job.call.request_class
        call.hold_connection(request)
        usage = course.job.usage
        num_most = usage.prompt_tokens + _most_tokens(fields)
        await call.hold_tokens(num_most, lambda: usage.prompt_tokens + usage.output_tokens if course.is_complete else 0)
        return _StreamedAnswer(self.proxy, course) if course.job.is_streamed else _WholeAnswer(self.proxy, course)

    def course(
        self,
        fields: Mapping[str, Any],
        path: str,
        model: ModelServices,
        arrival: Arrival,
        doors: str = "",
    ) -> Course:
        """Return what a body becomes. Raises InvalidRequest: its terms cannot be had."""
        for name in _STATEFUL if path == "/v1/responses" else ():
            if fields.get(name):
                raise InvalidRequest(
                    f"{name} is not supported behind upstreams.", param=name, code="unsupported_parameter"
                )
        if not isinstance(fields.get("stream", False), bool | None):
            refuse("stream", "it is true or false")
        terms = CallTerms.of(_Terms.of(fields), arrival, model)
        prompt = prompt_of(fields)
        usage = AnswerUsage.of(prompt)
        most = min(_most_tokens(fields), _MOST_ANSWER)
        slo = terms.slo.completed_by(terms.default)
        if not fields.get("stream"):  # whose first token nobody sees
            slo = Slo(deadline_s=slo.deadline_s)
        request = Request(
            request_id=RequestId(f"{arrival.request_id}-0"),
            prompt_token_ids=(0,) * usage.likely_prompt,
            sampling=SamplingParams(max_tokens=most),
            reply_to="",
            arrival_s=arrival.arrival_s,
            request_class=terms.tier.request_class,
            slo=slo,
            priority=terms.priority,
            tenant=arrival.key.owner,
            weight=arrival.key.weight,
        )
        name = model.model.name
        call = deciding.WaitingCall(
            arrival.request_id,
            name,
            request.request_class,
            request.tenant,
            request.weight,
            request.prompt_len,
            slo.completed_by(self.proxy.slo()) if fields.get("stream") else slo,
            beginnings_of(prompt, name, request.tenant),
            may_be_shed=request.request_class is DOCUMENT and not fields.get("stream"),
        )
        headers = {header: arrival.headers[header] for header in _PASSED if header in arrival.headers}
        headers[REQUEST_ID_HEADER] = arrival.request_id
        sent = {**fields, "model": name}
        return Course(PassedCall(call, path, sent, usage, doors, headers), request, model, arrival)


def _no_tokenizer() -> Tokenizer:
    raise ModelError("it is behind an upstream server")


def _name_of(fields: Mapping[str, Any]) -> str | None:
    name = fields.get("model")
    if name is not None and not isinstance(name, str):
        refuse("model", "it is the name of a model")
    return name


def _most_tokens(fields: Mapping[str, Any]) -> int:
    wanted = [fields[name] for name in _LIMITS if isinstance(fields.get(name), int)]
    num_choices = fields.get("n") if isinstance(fields.get("n"), int) else 1
    return max(0, wanted[0] if wanted else _LIKELY_ANSWER) * max(1, min(num_choices or 1, 128))


class _WholeAnswer(Response):
    def __init__(self, proxy: UpstreamProxy, course: Course) -> None:
        super().__init__()
        self._proxy, self._course = proxy, course

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._course as course:
            body = await while_connected(receive, self._proxy.whole(course.job))
            course.is_complete = True
        await JsonResponse(body)(scope, receive, send)


class _StreamedAnswer(Response):
    def __init__(self, proxy: UpstreamProxy, course: Course) -> None:
        super().__init__()
        self._proxy, self._course = proxy, course

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call.of(scope)
        call.failure_events = partial(failure_event, is_anthropic=call.is_anthropic, request_id=call.request_id)
        sender = EventSender(send, call)
        with self._course as course:
            await while_connected(receive, self._stream(course, sender), sender.check)
            course.is_complete = True
        await sender.end(b"")

    async def _stream(self, course: Course, sender: EventSender) -> None:
        async def write(events: bytes) -> None:
            if not sender.write_events(events):
                await sender.start()
                await sender.send_events(events)

        await self._proxy.stream(course.job, write)


# --- lines of batches


class UpstreamLineRunner:
    """A LineRunner whose lines are documents of upstreams."""

    def __init__(self, services: ApiServices, door: Door) -> None:
        self._services = services
        self._door = door
        self._num_tokens: Counter[str] = Counter()
        self._began_s = time.monotonic()

    async def run(self, line: LineRequest) -> LineResponse:
        key = self._services.keys.ring.owned_by(client_of(line.owner))
        headers = {} if line.deadline_s is None else {DEADLINE_HEADER: f"{line.deadline_s * 1000.0:.3f}"}
        headers |= {REQUEST_ID_HEADER: line.line_id} if line.line_id else {}
        arrival = Arrival(line.request_id, headers, key, is_line=True)
        with ExitStack() as held:
            try:
                if line.body.get("stream"):
                    refuse("stream", "a line of a batch is not streamed")
                fields = {**line.body, "service_tier": "flex"}
                model = usable_model(self._services.models, _name_of(fields), key)
                held.enter_context(model.in_use())
                course = held.enter_context(self._door.course(fields, line.endpoint.value, model, arrival))
                body = await self._door.proxy.whole(course.job)
            except InvalidRequest as error:
                return _error_response(line, error)
            except GenerationError as error:
                _raise(error)
        usage = course.job.usage
        self._num_tokens[model.model.name] += usage.output_tokens
        return LineResponse(HTTPStatus.OK, body, usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)

    def model_states(self) -> dict[str, ModelState]:
        states = {}
        for model in self._services.models.all:
            name, backend = model.card.name, UpstreamBackend(self._door.proxy, model.card.name)
            if backend.status() is not None:
                totals = ClusterTotals(self._num_tokens[name], time.monotonic() - self._began_s, 0.0)
                states[name] = ModelState(backend.num_places, totals)
        return states

    def may_use(self, owner: str, name: str) -> bool:
        return is_usable(self._services.models, name, self._services.keys.ring.owned_by(client_of(owner)))

    def model_of(self, name: str) -> str:
        return self._services.models.base_of(name)


def _raise(error: GenerationError) -> NoReturn:
    if isinstance(error, Overloaded | TimedOut | Unavailable):
        raise LineRejected(str(error), retry_after_s=error.retry_after_s or 1.0) from error
    raise LineFailed(str(error)) from error


def _error_response(line: LineRequest, error: AlignedServeError) -> LineResponse:
    is_message = line.endpoint is Endpoint.MESSAGES
    body = anthropic_error_body(error, request_id=line.request_id) if is_message else error_body(error)
    return LineResponse(http_error_of(error).status, body)
