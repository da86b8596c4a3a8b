"""Runs lines of batches as best-effort requests, each to the model that it names."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

from alignedserve.api.anthropic.message_format import anthropic_error_body
from alignedserve.api.endpoints import ENDPOINTS, RESPONSES
from alignedserve.api.errors import (
    GenerationError,
    Overloaded,
    TimedOut,
    Unavailable,
    Unservable,
    error_body,
    http_error_of,
)
from alignedserve.api.models.model_registry import is_usable, usable_model
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.parsing import check_shape
from alignedserve.api.openai.request_builder import DEADLINE_HEADER, Arrival, GenerationRequest
from alignedserve.api.openai.response_format import MakeBodyFormatter, collect_body
from alignedserve.api.responses.formatter import BackgroundFormatter, generate_body
from alignedserve.api.schema import IgnoredFields, Schema
from alignedserve.api.services import ApiServices
from alignedserve.api.timelines.timeline import REQUEST_ID_HEADER
from alignedserve.batches.interfaces import (
    ClusterTotals,
    LineFailed,
    LineRejected,
    LineRequest,
    LineResponse,
    ModelState,
)
from alignedserve.batches.records import Endpoint, client_of, take_streamed_response
from alignedserve.batches.responses.response_repository import EventLimits, EventLog
from alignedserve.core.errors import AlignedServeError, InvalidRequest
from alignedserve.keys.entry import KeyEntry

_SERVICE_TIER = "flex"  # best effort
_ALLOWED_SERVICE_TIERS = ("auto", "default", "standard_only", _SERVICE_TIER)

# Fields of a response that are about its place among stored ones: a line's result is its only record.
_STATE_FIELDS = ("background", "conversation", "previous_response_id", "store")

FieldsT = TypeVar("FieldsT", bound=Schema)
_RETRY_AFTER_S = 1.0


class LineJob(NamedTuple):
    """A line's model, its request and the formatter of its response."""

    model: ModelServices
    request: GenerationRequest
    make_formatter: MakeBodyFormatter
    make_event_formatter: Callable[[Generation], BackgroundFormatter] | None = None  # its events are written


async def build_job(line: LineRequest, services: ApiServices, held: ExitStack) -> LineJob:
    """Return the job of a line, whose model `held` holds from here on.

    Raises InvalidRequest: the line can never be run; Unavailable: not now.
    """
    check_shape(line.body, services.config.max_json_depth)
    endpoint = ENDPOINTS[line.endpoint.value]
    streamed = _streamed_response(line) if endpoint is RESPONSES else None
    key = services.keys.ring.owned_by(client_of(line.owner))
    arrival = _arrival_of(line, key, None if services.config.strict else IgnoredFields(), streamed)
    body = _at_best_effort(endpoint.parse(line.body, arrival.ignored))
    model = usable_model(services.models, body.model, key)
    held.enter_context(model.in_use())
    await model.read_tokenizer()
    job = LineJob(model, await endpoint.build(body, arrival, model, None), endpoint.formatter(body, model))
    if streamed is None:
        return job
    return job._replace(make_event_formatter=partial(BackgroundFormatter, body=body, response=streamed))


def _arrival_of(
    line: LineRequest, key: KeyEntry, ignored: IgnoredFields | None, streamed: dict[str, Any] | None
) -> Arrival:
    headers = {} if line.deadline_s is None else {DEADLINE_HEADER: f"{line.deadline_s * 1000.0:.3f}"}
    headers |= {REQUEST_ID_HEADER: line.line_id} if line.line_id else {}
    response_id = None if streamed is None else streamed["id"]
    return Arrival(line.request_id, headers, key, ignored, response_id, is_line=True)


def _streamed_response(line: LineRequest) -> dict[str, Any] | None:
    for name in _STATE_FIELDS:
        if line.body.get(name):
            raise InvalidRequest(f"{name} is not supported in a batch.", param=name, code="unsupported_parameter")
    return take_streamed_response(line.body, line.owner)


def _at_best_effort(fields: FieldsT) -> FieldsT:
    if getattr(fields, "stream", False):
        raise InvalidRequest("stream is not supported in a batch.", param="stream", code="unsupported_parameter")
    if getattr(fields, "service_tier", None) not in _ALLOWED_SERVICE_TIERS:
        raise InvalidRequest(
            "Lines of a batch run at best effort; leave service_tier out.",
            param="service_tier",
            code="unsupported_parameter",
        )
    return fields.model_copy(update={"service_tier": _SERVICE_TIER})


class ClusterLineRunner:
    """A LineRunner that generates in the cluster."""

    def __init__(self, services: ApiServices, events: EventLog | None = None) -> None:
        self._services = services
        self._events = events

    async def run(self, line: LineRequest) -> LineResponse:
        with ExitStack() as held:
            try:
                job = await build_job(line, self._services, held)
            except InvalidRequest as error:
                return _error_response(line, error)
            except GenerationError as error:
                return _failure(line, error, has_started=False)
            generation = Generation(job.request, job.model)
            try:
                body = await self._body(job, generation, client_of(line.owner))
            except GenerationError as error:
                return _failure(line, error, has_started=generation.has_started)
        return LineResponse(
            200,
            body,
            job.request.num_prompt_tokens,
            generation.num_generated_tokens,
            generation.num_cached_tokens,
            generation.compute_us,
        )

    async def _body(self, job: LineJob, generation: Generation, client: str) -> bytes:
        if job.make_event_formatter is None or self._events is None:
            return await collect_body(generation, job.make_formatter)
        config = self._services.config
        limits = EventLimits(config.max_response_events_bytes, config.max_events_bytes)
        return await generate_body(generation, job.make_event_formatter, self._events, client, limits)

    def model_states(self) -> dict[str, ModelState]:
        states = {}
        for model in self._services.models.all:
            status = model.services.backend.status() if model.services is not None else None
            if status is not None:
                log = status.iteration_log
                totals = ClusterTotals(log.num_requests, log.wall_s, log.nothing_to_do_s)
                states[model.card.name] = ModelState(status.num_places, totals)
        return states

    def may_use(self, owner: str, name: str) -> bool:
        return is_usable(self._services.models, name, self._services.keys.ring.owned_by(client_of(owner)))

    def model_of(self, name: str) -> str:
        return self._services.models.base_of(name)


def _failure(line: LineRequest, error: GenerationError, *, has_started: bool) -> LineResponse:
    if isinstance(error, Unservable):
        return _error_response(line, error)
    # A line that was silent for an hour waited all the time for chat, or for a worker: for nothing of its own.
    if isinstance(error, Overloaded | TimedOut) or (isinstance(error, Unavailable) and not has_started):
        raise LineRejected(str(error), retry_after_s=error.retry_after_s or _RETRY_AFTER_S) from error
    raise LineFailed(str(error)) from error


def _error_response(line: LineRequest, error: AlignedServeError) -> LineResponse:
    is_message = line.endpoint is Endpoint.MESSAGES
    body = anthropic_error_body(error, request_id=line.request_id) if is_message else error_body(error)
    return LineResponse(http_error_of(error).status, body)
