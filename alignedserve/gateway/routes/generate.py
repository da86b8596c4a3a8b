"""POST /v1/chat/completions and /v1/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.gateway.openai.generation import Generation
from alignedserve.gateway.openai.parsing import parse_chat, parse_completion, read_json
from alignedserve.gateway.openai.request_builder import (
    Arrival,
    GenerationRequest,
    build_chat_request,
    build_completion_request,
)
from alignedserve.gateway.openai.streaming import BodyResponse, EventStreamResponse
from alignedserve.gateway.routes.dependencies import rate_limited_services
from alignedserve.gateway.services import Services

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(http: Request) -> Response:
    """Answer a conversation."""
    services = await rate_limited_services(http)
    arrival = _arrival(http, services)
    chat = parse_chat(await read_json(http, services.config))
    return _respond(await build_chat_request(chat, arrival, services), services)


@router.post("/v1/completions", response_model=None)
async def create_completion(http: Request) -> Response:
    """Continue one prompt or several."""
    services = await rate_limited_services(http)
    arrival = _arrival(http, services)
    completion = parse_completion(await read_json(http, services.config))
    return _respond(await build_completion_request(completion, arrival, services), services)


def _arrival(http: Request, services: Services) -> Arrival:
    return Arrival(http.state.request_id, http.headers, services.api_keys.owner(http.state.key_number))


def _respond(request: GenerationRequest, services: Services) -> Response:
    generation = Generation(request, services)
    return EventStreamResponse(generation) if request.is_streamed else BodyResponse(generation)
