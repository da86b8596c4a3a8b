"""Routes of /v1/responses: create, get, delete, cancel, list input items, count input tokens."""

from dataclasses import replace
from functools import partial

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.endpoints import INPUT_TOKENS, RESPONSES
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.generation_request import Arrival, GenerationRequest
from alignedserve.api.responses.bodies import CreateResponseRequest, InputTokensRequest, parse_response
from alignedserve.api.responses.formatter import ResponsesFormatter, new_response
from alignedserve.api.responses.request_builder import build_response_request, input_tokens_answer
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import RequestClass, Slo
from alignedserve.gateway.files.views import list_view
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.responses.responses_api import ResponsesApi, Turn
from alignedserve.gateway.responses.stored_events import (
    ResponseBody,
    ResponseEvents,
    StoredEvents,
    StoredEventsResponse,
)
from alignedserve.gateway.routes.dependencies import (
    answered_awake,
    awake_model_of,
    hold_connection,
    hold_limits,
    ignored_fields_of,
    key_of,
    model_of,
    rate_limited_services,
    services_of,
)
from alignedserve.gateway.routes.generate import arrival_of
from alignedserve.gateway.routes.request_bodies import parsed, read_and_answer, read_if_long, receive
from alignedserve.gateway.routes.request_parameters import item_page, number, one_of, page_of
from alignedserve.gateway.services import Services

router = APIRouter()


@router.post("/v1/responses", response_model=None)
async def create_response(http: Request) -> Response:
    """Answer items, streamed if the client asked for that, or later in the background."""
    services = await rate_limited_services(http)
    ignored = ignored_fields_of(http)
    arrival, raw = arrival_of(http, ignored), await receive(http, services)
    await read_if_long(raw, RESPONSES.path, services, ignored, arrival.key)  # what is refused there is not read here
    asked = await parsed(raw, services, partial(parse_response, ignored=ignored))

    async def answer() -> Response:
        return await _answer(http, asked, arrival)

    return await answered_awake(http, asked, answer, is_streamed=asked.stream)


async def _answer(http: Request, asked: CreateResponseRequest, arrival: Arrival) -> Response:
    model, api = model_of(http, asked.model), _api(http, services_of(http))
    turn = await api.begin(asked, arrival.ignored)
    request = await build_response_request(asked, turn.all_items, turn.response_id, arrival, model)
    if asked.background:
        if asked.stream:
            hold_connection(http, RequestClass.BEST_EFFORT)
        queued = await _submit(api, asked, turn, request)
        if asked.stream:
            return StoredEventsResponse(StoredEvents(api, api.event_log, turn.response_id, is_new=True))
        return JsonResponse(queued)
    hold_connection(http, request.requests[0].request_class)
    generation = Generation(request, model)
    await hold_limits(http, generation)
    return _respond(api, asked, turn, generation)


@router.post("/v1/responses/input_tokens", response_model=None)
async def count_tokens(http: Request) -> Response:
    """Count the tokens of the prompt that a response would have."""
    services = await rate_limited_services(http)
    ignored = ignored_fields_of(http)

    async def answer(asked: InputTokensRequest) -> bytes:
        model = await awake_model_of(http, asked)
        turn = await _api(http, services).begin(asked, ignored)
        return await input_tokens_answer(asked, turn.all_items, model)

    return JsonResponse(await read_and_answer(http, INPUT_TOKENS, services, ignored, answer))


@router.get("/v1/responses/{response_id}", response_model=None)
async def get_response(http: Request, response_id: str) -> Response:
    """Return a stored response."""
    services = await rate_limited_services(http)
    api = _api(http, services)
    record = await api.retrieve(response_id)
    if one_of(http, "stream", ("false", "true")) == "false":
        return JsonResponse(bytes(record.response))
    if not await api.event_log.read(record.response_id, 0):
        message = "Only responses in the background that were created with stream have events, for a time."
        raise InvalidRequest(message, param="stream", code="events_not_stored")
    starting_after = number(http, "starting_after", default=-1)
    hold_connection(http, RequestClass.BEST_EFFORT)
    return StoredEventsResponse(StoredEvents(api, api.event_log, record.response_id, starting_after))


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(http: Request, response_id: str) -> Response:
    """Delete a stored response."""
    services = await rate_limited_services(http)
    record = await _api(http, services).delete(response_id)
    return JsonResponse({"id": record.response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(http: Request, response_id: str) -> Response:
    """Cancel a response in the background."""
    services = await rate_limited_services(http)
    return JsonResponse(bytes((await _api(http, services).cancel(response_id)).response))


@router.get("/v1/responses/{response_id}/input_items", response_model=None)
async def list_input_items(http: Request, response_id: str) -> Response:
    """List the items of a response's own input, a page at a time."""
    services = await rate_limited_services(http)
    items, has_more = page_of(await _api(http, services).input_items(response_id), item_page(http))
    return JsonResponse({"first_id": "", "last_id": ""} | list_view(items, has_more=has_more))


def _api(http: Request, services: Services) -> ResponsesApi:
    return ResponsesApi.of(services, key_of(http).owner)


def _respond(api: ResponsesApi, asked: CreateResponseRequest, turn: Turn, generation: Generation) -> Response:
    make_formatter = partial(ResponsesFormatter, body=asked, is_stored=turn.is_stored)
    kind = ResponseEvents if asked.stream else ResponseBody
    return kind(generation, make_formatter, partial(api.keep, turn))


async def _submit(api: ResponsesApi, asked: CreateResponseRequest, turn: Turn, request: GenerationRequest) -> bytes:
    if request.slo != Slo():
        raise InvalidRequest("Objectives of latency are not supported with background.", param="background")
    request = replace(request, response_id=turn.response_id, service_tier="flex")
    response = new_response(asked, request, is_stored=True)
    return orjson.dumps(await api.submit(asked, turn, response))
