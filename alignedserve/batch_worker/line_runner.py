"""Runs a line of a batch as a best-effort request: the LineRunner of a cluster."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from alignedserve.batches.interfaces import ClusterTotals, LineFailed, LineRejected, LineRequest, LineResponse
from alignedserve.batches.records import Endpoint
from alignedserve.core.errors import AlignedServeError, InvalidRequest
from alignedserve.core.request import Slo
from alignedserve.gateway.anthropic.errors import anthropic_error_body
from alignedserve.gateway.anthropic.message_format import MessageFormatter
from alignedserve.gateway.anthropic.message_request import build_message_request
from alignedserve.gateway.anthropic.parsing import BodyParser
from alignedserve.gateway.anthropic.schemas import MessagesRequest
from alignedserve.gateway.embeddings.request_builder import build_embedding_request
from alignedserve.gateway.embeddings.response_format import EmbeddingFormatter
from alignedserve.gateway.embeddings.schemas import EmbeddingRequest
from alignedserve.gateway.errors import GenerationError, Overloaded, Unavailable, Unservable, error_body, http_error_of
from alignedserve.gateway.files.submission import client_of
from alignedserve.gateway.openai.generation import Generation
from alignedserve.gateway.openai.parsing import check_shape, parse, parse_chat, parse_completion
from alignedserve.gateway.openai.request_builder import (
    Arrival,
    GenerationRequest,
    build_chat_request,
    build_completion_request,
)
from alignedserve.gateway.openai.response_format import BodyFormatter, ChatFormatter, CompletionFormatter, collect_body
from alignedserve.gateway.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.gateway.openai.schemas.requests import ChatCompletionRequest, CompletionRequest
from alignedserve.gateway.openai.slo_headers import DEADLINE_HEADER
from alignedserve.gateway.responses.context import resolve_references
from alignedserve.gateway.responses.formatter import ResponsesFormatter
from alignedserve.gateway.responses.items import parse_items
from alignedserve.gateway.responses.parsing import parse_response
from alignedserve.gateway.responses.request_builder import build_response_request, new_response_id
from alignedserve.gateway.responses.schemas import CreateResponseRequest
from alignedserve.gateway.services import Services

_RETRY_AFTER_S = 1.0
_SERVICE_TIER = "flex"  # best effort
_ALLOWED_SERVICE_TIERS = ("auto", "default", "standard_only", _SERVICE_TIER)

# Fields of a response that are about its place among stored ones: a line's result is its only record.
_STATE_FIELDS = ("background", "previous_response_id", "store")

FieldsT = TypeVar("FieldsT", ChatCompletionRequest, CompletionRequest, CreateResponseRequest, MessagesRequest)


TieredT = TypeVar(
    "TieredT", ChatCompletionRequest, CompletionRequest, CreateResponseRequest, EmbeddingRequest, MessagesRequest
)


class _Job(NamedTuple):
    """A line's request and the formatter of its response."""

    request: GenerationRequest
    make_formatter: Callable[[Generation], BodyFormatter]


class ClusterLineRunner:
    """A LineRunner that generates in the cluster."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def run(self, line: LineRequest) -> LineResponse:
        """Run one line; see LineRunner."""
        try:
            request, make_formatter = await self._build_job(line)
        except InvalidRequest as error:
            return _error_response(line, error)
        generation = Generation(request, self._services)
        try:
            body = await collect_body(generation, make_formatter)
        except GenerationError as error:
            return _failure(line, error, has_started=generation.has_started)
        num_prompt_tokens, num_cached_tokens = request.num_prompt_tokens, generation.num_cached_tokens
        return LineResponse(200, body, num_prompt_tokens, generation.num_generated_tokens, num_cached_tokens)

    def cluster_totals(self) -> ClusterTotals | None:
        """Return the totals of the cluster; see LineRunner."""
        status = self._services.backend.status()
        if status is None:
            return None
        totals = status.iteration_log
        return ClusterTotals(totals.num_requests, totals.wall_s, totals.nothing_to_do_s)

    async def _build_job(self, line: LineRequest) -> _Job:
        """Return the line's request and formatter. Raises InvalidRequest: the line can never be run."""
        check_shape(line.body, self._services.config.max_json_depth)
        headers = {} if line.deadline_s is None else {DEADLINE_HEADER: f"{line.deadline_s * 1000.0:.3f}"}
        arrival = Arrival(line.request_id, headers, client_of(line.owner))
        ignored = None if self._services.config.strict else IgnoredFields()
        request, make_formatter = await self._build(line, arrival, ignored)
        names = ignored.names if ignored is not None else ()
        # The line's deadline is ours, not the client's: its response does not report it.
        return _Job(replace(request, slo=Slo(), ignored_fields=names), make_formatter)

    async def _build(self, line: LineRequest, arrival: Arrival, ignored: IgnoredFields | None) -> _Job:
        match line.endpoint:
            case Endpoint.CHAT:
                chat = _at_best_effort(parse_chat(line.body, ignored))
                return _Job(await build_chat_request(chat, arrival, self._services), ChatFormatter)
            case Endpoint.COMPLETION:
                completion = _at_best_effort(parse_completion(line.body, ignored))
                return _Job(await build_completion_request(completion, arrival, self._services), CompletionFormatter)
            case Endpoint.EMBEDDINGS:
                return await self._build_embeddings(line, arrival, ignored)
            case Endpoint.MESSAGES:
                return await self._build_message(line, arrival, ignored)
            case Endpoint.RESPONSES:
                return await self._build_response(line, arrival, ignored)

    async def _build_embeddings(self, line: LineRequest, arrival: Arrival, ignored: IgnoredFields | None) -> _Job:
        asked = _with_tier_of_batches(parse(EmbeddingRequest, line.body, ignored))
        request = await build_embedding_request(asked, arrival, self._services)
        return _Job(request, partial(EmbeddingFormatter, encoding_format=asked.encoding_format))

    async def _build_message(self, line: LineRequest, arrival: Arrival, ignored: IgnoredFields | None) -> _Job:
        parser = BodyParser(ignored)
        asked = _at_best_effort(parser.fields(MessagesRequest, line.body))
        request = await build_message_request(asked, parser, arrival, self._services)
        return _Job(request, partial(MessageFormatter, asked=asked))

    async def _build_response(self, line: LineRequest, arrival: Arrival, ignored: IgnoredFields | None) -> _Job:
        for name in _STATE_FIELDS:
            if line.body.get(name):
                raise InvalidRequest(f"{name} is not supported in a batch.", param=name, code="unsupported_parameter")
        asked, response_id = _at_best_effort(parse_response(line.body, ignored)), new_response_id()
        items = await resolve_references(None, parse_items(asked.input, response_id, ignored))
        request = await build_response_request(asked, items, response_id, arrival, self._services)
        return _Job(request, partial(ResponsesFormatter, asked=asked))


def _at_best_effort(fields: FieldsT) -> FieldsT:
    """Return the fields at the service tier of batches. Raises InvalidRequest for fields that batches refuse."""
    if fields.stream:
        raise InvalidRequest("stream is not supported in a batch.", param="stream", code="unsupported_parameter")
    return _with_tier_of_batches(fields)


def _with_tier_of_batches(fields: TieredT) -> TieredT:
    """Return the fields at the service tier of batches. Raises InvalidRequest for another one."""
    if fields.service_tier not in _ALLOWED_SERVICE_TIERS:
        raise InvalidRequest(
            "Lines of a batch run at best effort; leave service_tier out.",
            param="service_tier",
            code="unsupported_parameter",
        )
    return fields.model_copy(update={"service_tier": _SERVICE_TIER})


def _failure(line: LineRequest, error: GenerationError, *, has_started: bool) -> LineResponse:
    """Return the final response of a line that can never succeed. Raises LineNotTaken or LineBroken for a retry."""
    if isinstance(error, Unservable):
        return _error_response(line, error)
    if isinstance(error, Overloaded) or (isinstance(error, Unavailable) and not has_started):
        raise LineRejected(str(error), retry_after_s=error.retry_after_s or _RETRY_AFTER_S) from error
    raise LineFailed(str(error)) from error


def _error_response(line: LineRequest, error: AlignedServeError) -> LineResponse:
    is_message = line.endpoint is Endpoint.MESSAGES
    body = anthropic_error_body(error, request_id=line.request_id) if is_message else error_body(error)
    return LineResponse(http_error_of(error).status, body)
