"""The endpoints that generate or count tokens, each by its record in the table of endpoints."""

from functools import partial
from typing import Any, cast

from starlette.responses import Response

from alignedserve.api.endpoints import (
    ENDPOINTS,
    INPUT_TOKENS,
    RERANK,
    RESPONSES,
    TOKEN_ENDPOINTS,
    GeneratingEndpoint,
    TokenEndpoint,
)
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.prompt_encoding import Prompts
from alignedserve.api.openai.response_format import MakeFormatter
from alignedserve.gateway.call import Call, RouteTable
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.routes.request_bodies import read_and_answer, read_prompts
from alignedserve.gateway.streaming import BodyResponse, EventStreamResponse, answered_awake, awake_model

ROUTES = RouteTable()


async def _generate(endpoint: GeneratingEndpoint[Any], call: Call) -> Response:
    """Answer with what the cluster generates, streamed if the client asked for that."""
    if call.answer_elsewhere is not None:
        return await call.answer_elsewhere(endpoint.path)
    body, prompts = await read_prompts(call, endpoint)
    answer = partial(_answer, endpoint, call, body, prompts)
    return await answered_awake(call, body, answer, is_streamed=getattr(body, "stream", False))


async def _answer(endpoint: GeneratingEndpoint[Any], call: Call, body: Any, prompts: Prompts | None) -> Response:
    model = call.model(body.model)
    request = await endpoint.build(body, call.arrival, model, prompts)
    call.hold_connection(request.requests[0].request_class)
    generation = Generation(request, model)
    await call.hold_limits(generation)
    make_formatter = endpoint.formatter(body, model)
    if generation.request.is_streamed:  # only of endpoints with such formatters
        return EventStreamResponse(generation, cast(MakeFormatter, make_formatter))
    return BodyResponse(generation, make_formatter)


async def _count(endpoint: TokenEndpoint[Any], call: Call) -> Response:
    if call.answer_elsewhere is not None:
        return await call.answer_elsewhere(endpoint.path)

    async def answer(body: Any) -> bytes:
        return await endpoint.answer(body, await awake_model(call, body), call.ignored)

    return JsonResponse(await read_and_answer(call, endpoint, answer))


for generating in ENDPOINTS.values():
    if generating is not RESPONSES:  # which may be stored, as the next: routes of their own
        ROUTES.add("POST", generating.path)(partial(_generate, generating))
for counting in TOKEN_ENDPOINTS.values():
    if counting is not INPUT_TOKENS:
        ROUTES.add("POST", f"/v1{counting.path.removeprefix('/v1')}")(partial(_count, counting))
ROUTES.add("POST", "/v2/rerank")(partial(_generate, RERANK))  # Cohere's path
