"""Builds the requests of lines of batches: at best effort, to the model that each line names."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

from alignedserve.api.endpoints import ENDPOINTS, RESPONSES
from alignedserve.api.models.model_registry import usable_model
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.generation_request import DEADLINE_HEADER, Arrival, GenerationRequest
from alignedserve.api.openai.parsing import check_shape
from alignedserve.api.openai.response_format import MakeBodyFormatter
from alignedserve.api.responses.background_events import BackgroundFormatter
from alignedserve.api.schema import IgnoredFields, Schema
from alignedserve.api.services import ApiServices
from alignedserve.api.timelines.timeline import REQUEST_ID_HEADER
from alignedserve.batches.interfaces import LineRequest
from alignedserve.batches.records import client_of, take_streamed_response
from alignedserve.core.errors import InvalidRequest
from alignedserve.keys.entry import KeyEntry

_SERVICE_TIER = "flex"  # best effort
_ALLOWED_SERVICE_TIERS = ("auto", "default", "standard_only", _SERVICE_TIER)

# Fields of a response that are about its place among stored ones: a line's result is its only record.
_STATE_FIELDS = ("background", "conversation", "previous_response_id", "store")

FieldsT = TypeVar("FieldsT", bound=Schema)


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
    asked = _at_best_effort(endpoint.parse(line.body, arrival.ignored))
    model = usable_model(services.models, asked.model, key)
    held.enter_context(model.in_use())
    await model.read_tokenizer()
    job = LineJob(model, await endpoint.build(asked, arrival, model, None), endpoint.formatter(asked, model))
    if streamed is None:
        return job
    return job._replace(make_event_formatter=partial(BackgroundFormatter, body=asked, response=streamed))


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
