"""The endpoints that generate or count tokens, each by its record in the table of endpoints."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.endpoints import (
    ENDPOINTS,
    INPUT_TOKENS,
    RESPONSES,
    TOKEN_ENDPOINTS,
    GeneratingEndpoint,
    TokenEndpoint,
)
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.generation_request import Arrival
from alignedserve.api.openai.prompt_encoding import Prompts
from alignedserve.api.openai.response_format import MakeFormatter
from alignedserve.api.schema import IgnoredFields
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.routes.dependencies import (
    answered_awake,
    awake_model_of,
    hold_connection,
    hold_limits,
    ignored_fields_of,
    key_of,
    model_of,
    rate_limited_services,
)
from alignedserve.gateway.routes.request_bodies import read_and_answer, read_prompts
from alignedserve.gateway.streaming import BodyResponse, EventStreamResponse

router = APIRouter()


async def _generate(endpoint: GeneratingEndpoint[Any], http: Request) -> Response:
    """Answer with what the cluster generates, streamed if the client asked for that."""
    services = await rate_limited_services(http)
    arrival = arrival_of(http, ignored_fields_of(http))
    asked, prompts = await read_prompts(http, endpoint, services, arrival.ignored)

    async def answer() -> Response:
        return await _answer(endpoint, http, asked, arrival, prompts)

    return await answered_awake(http, asked, answer, is_streamed=getattr(asked, "stream", False))


async def _answer(
    endpoint: GeneratingEndpoint[Any], http: Request, asked: Any, arrival: Arrival, prompts: Prompts | None
) -> Response:
    model = model_of(http, asked.model)
    request = await endpoint.build(asked, arrival, model, prompts)
    hold_connection(http, request.requests[0].request_class)
    generation = Generation(request, model)
    await hold_limits(http, generation)
    make_formatter = endpoint.formatter(asked, model)
    if generation.request.is_streamed:  # bodies that may ask for it have formatters that can
        return EventStreamResponse(generation, cast(MakeFormatter, make_formatter))
    return BodyResponse(generation, make_formatter)


async def _count(endpoint: TokenEndpoint[Any], http: Request) -> Response:
    """Answer from the tokens of a prompt, without generating."""
    services = await rate_limited_services(http)
    ignored = ignored_fields_of(http)

    async def answer(asked: Any) -> bytes:
        return await endpoint.answer(asked, await awake_model_of(http, asked), ignored)

    return JsonResponse(await read_and_answer(http, endpoint, services, ignored, answer))


def arrival_of(http: Request, ignored: IgnoredFields | None) -> Arrival:
    """Return the facts about this request beside its body."""
    return Arrival(http.state.request_id, http.headers, key_of(http), ignored)


def _route(path: str, serve: Callable[[Request], Awaitable[Response]]) -> None:
    async def handle(http: Request) -> Response:
        return await serve(http)

    router.add_api_route(path, handle, methods=["POST"], response_model=None)


for generating in ENDPOINTS.values():
    if generating is not RESPONSES:  # which may be stored, as the next: routes of their own
        _route(generating.path, partial(_generate, generating))
for counting in TOKEN_ENDPOINTS.values():
    if counting is not INPUT_TOKENS:
        _route(counting.path, partial(_count, counting))
