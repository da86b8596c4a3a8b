"""Builds the requests of lines of batches: at best effort, to the model that each line names."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

from alignedserve.api.anthropic.message_format import MessageFormatter
from alignedserve.api.anthropic.message_request import build_message_request
from alignedserve.api.anthropic.parsing import BodyParser
from alignedserve.api.anthropic.schemas import MessagesRequest
from alignedserve.api.embeddings.request_builder import build_embedding_request
from alignedserve.api.embeddings.response_format import EmbeddingFormatter
from alignedserve.api.embeddings.schemas import EmbeddingRequest
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.parsing import check_shape, parse, parse_chat, parse_completion
from alignedserve.api.openai.request_builder import (
    Arrival,
    GenerationRequest,
    build_chat_request,
    build_completion_request,
)
from alignedserve.api.openai.response_format import BodyFormatter, ChatFormatter, CompletionFormatter
from alignedserve.api.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.api.openai.schemas.requests import ChatCompletionRequest, CompletionRequest
from alignedserve.api.openai.slo_headers import DEADLINE_HEADER
from alignedserve.api.own_batches import client_of, take_streamed_response
from alignedserve.api.responses.background_events import BackgroundFormatter
from alignedserve.api.responses.context import resolve_references
from alignedserve.api.responses.formatter import ResponsesFormatter
from alignedserve.api.responses.items import parse_items
from alignedserve.api.responses.parsing import parse_response
from alignedserve.api.responses.request_builder import build_response_request, new_response_id
from alignedserve.api.responses.schemas import CreateResponseRequest
from alignedserve.api.services import ApiServices
from alignedserve.api.timelines.request_ids import REQUEST_ID_HEADER
from alignedserve.batches.interfaces import LineRequest
from alignedserve.batches.records import Endpoint
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import Slo

_SERVICE_TIER = "flex"  # best effort
_ALLOWED_SERVICE_TIERS = ("auto", "default", "standard_only", _SERVICE_TIER)

# Fields of a response that are about its place among stored ones: a line's result is its only record.
_STATE_FIELDS = ("background", "conversation", "previous_response_id", "store")

FieldsT = TypeVar("FieldsT", ChatCompletionRequest, CompletionRequest, CreateResponseRequest, MessagesRequest)


TieredT = TypeVar(
    "TieredT", ChatCompletionRequest, CompletionRequest, CreateResponseRequest, EmbeddingRequest, MessagesRequest
)


class LineJob(NamedTuple):
    """A line's model, its request and the formatter of its response."""

    model: ModelServices
    request: GenerationRequest
    make_formatter: Callable[[Generation], BodyFormatter]
    make_event_formatter: Callable[[Generation], BackgroundFormatter] | None = None  # its events are written


async def build_job(line: LineRequest, services: ApiServices, held: ExitStack) -> LineJob:
    """Return the job of a line, whose model `held` holds from here on.

    Raises InvalidRequest: the line can never be run; Unavailable: not now.
    """
    check_shape(line.body, services.config.max_json_depth)
    headers = {} if line.deadline_s is None else {DEADLINE_HEADER: f"{line.deadline_s * 1000.0:.3f}"}
    headers |= {REQUEST_ID_HEADER: line.line_id} if line.line_id else {}
    arrival = Arrival(line.request_id, headers, client_of(line.owner))
    ignored = None if services.config.strict else IgnoredFields()
    job = await _JobBuilder(line, services, held, arrival, ignored).build()
    names = ignored.names if ignored is not None else ()
    # The line's deadline is ours, not the client's: its response does not report it.
    return job._replace(request=replace(job.request, slo=Slo(), ignored_fields=names))


@dataclass(frozen=True, slots=True)
class _JobBuilder:
    line: LineRequest
    services: ApiServices
    held: ExitStack
    arrival: Arrival
    ignored: IgnoredFields | None

    async def build(self) -> LineJob:
        """Return the job, still with the deadline of its batch."""
        match self.line.endpoint:
            case Endpoint.CHAT:
                chat = _at_best_effort(parse_chat(self.line.body, self.ignored))
                model = self._model(chat.model)
                return LineJob(model, await build_chat_request(chat, self.arrival, model), ChatFormatter)
            case Endpoint.COMPLETION:
                completion = _at_best_effort(parse_completion(self.line.body, self.ignored))
                model = self._model(completion.model)
                request = await build_completion_request(completion, self.arrival, model)
                return LineJob(model, request, CompletionFormatter)
            case Endpoint.EMBEDDINGS:
                return await self._embeddings()
            case Endpoint.MESSAGES:
                return await self._message()
            case Endpoint.RESPONSES:
                return await self._response()

    def _model(self, name: str | None) -> ModelServices:
        model = self.services.find_model(name)
        self.held.enter_context(model.in_use())
        return model

    async def _embeddings(self) -> LineJob:
        asked = _with_tier_of_batches(parse(EmbeddingRequest, self.line.body, self.ignored))
        model = self._model(asked.model)
        request = await build_embedding_request(asked, self.arrival, model)
        make_formatter = partial(EmbeddingFormatter, encoding_format=asked.encoding_format, dimensions=asked.dimensions)
        return LineJob(model, request, make_formatter)

    async def _message(self) -> LineJob:
        parser = BodyParser(self.ignored)
        asked = _at_best_effort(parser.fields(MessagesRequest, self.line.body))
        model = self._model(asked.model)
        request = await build_message_request(asked, parser, self.arrival, model)
        return LineJob(model, request, partial(MessageFormatter, asked=asked))

    async def _response(self) -> LineJob:
        for name in _STATE_FIELDS:
            if self.line.body.get(name):
                raise InvalidRequest(f"{name} is not supported in a batch.", param=name, code="unsupported_parameter")
        streamed = take_streamed_response(self.line.body, self.line.owner)
        asked = _at_best_effort(parse_response(self.line.body, self.ignored))
        response_id = new_response_id() if streamed is None else streamed["id"]
        model = self._model(asked.model)
        items = await resolve_references(None, parse_items(asked.input, response_id, self.ignored))
        request = await build_response_request(asked, items, response_id, self.arrival, model)
        job = LineJob(model, request, partial(ResponsesFormatter, asked=asked))
        if streamed is None:
            return job
        return job._replace(make_event_formatter=partial(BackgroundFormatter, asked=asked, response=streamed))


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
