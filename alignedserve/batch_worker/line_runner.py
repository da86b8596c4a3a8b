"""Runs a line of a batch as a best-effort request: the LineRunner of a cluster."""

from contextlib import ExitStack

from alignedserve.api.anthropic.message_format import anthropic_error_body
from alignedserve.api.errors import (
    GenerationError,
    Overloaded,
    TimedOut,
    Unavailable,
    Unservable,
    error_body,
    http_error_of,
)
from alignedserve.api.models.model_registry import is_usable
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.response_format import collect_body
from alignedserve.api.responses.background_events import generate_body
from alignedserve.api.services import ApiServices
from alignedserve.batch_worker.line_jobs import LineJob, build_job
from alignedserve.batches.interfaces import (
    ClusterTotals,
    LineFailed,
    LineRejected,
    LineRequest,
    LineResponse,
    ModelState,
)
from alignedserve.batches.records import Endpoint, client_of
from alignedserve.batches.responses.event_log import EventLimits, EventLog
from alignedserve.core.errors import AlignedServeError, InvalidRequest

_RETRY_AFTER_S = 1.0


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
