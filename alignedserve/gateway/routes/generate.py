"""POST /v1/chat/completions and /v1/completions."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation import Generation
from alignedserve.api.openai.parsing import parse_chat, parse_completion
from alignedserve.api.openai.request_builder import (
    Arrival,
    GenerationRequest,
    build_chat_request,
    build_completion_request,
)
from alignedserve.api.openai.response_format import ChatFormatter, CompletionFormatter, MakeFormatter
from alignedserve.gateway.long_bodies.messages import Kind
from alignedserve.gateway.routes.dependencies import ignored_fields_of, model_of, rate_limited_services
from alignedserve.gateway.routes.request_bodies import read_prompts
from alignedserve.gateway.services import Services
from alignedserve.gateway.streaming import BodyResponse, EventStreamResponse

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(http: Request) -> Response:
    """Answer a conversation."""
    services = await rate_limited_services(http)
    arrival = arrival_of(http, services)
    ignored = ignored_fields_of(http)
    chat, prompts = await read_prompts(http, Kind.CHAT, services, partial(parse_chat, ignored=ignored), ignored)
    model = model_of(http, chat.model)
    return respond(await build_chat_request(chat, arrival, model, prompts), model, ChatFormatter)


@router.post("/v1/completions", response_model=None)
async def create_completion(http: Request) -> Response:
    """Continue one prompt or several."""
    services = await rate_limited_services(http)
    arrival = arrival_of(http, services)
    ignored = ignored_fields_of(http)
    parse = partial(parse_completion, ignored=ignored)
    completion, prompts = await read_prompts(http, Kind.COMPLETION, services, parse, ignored)
    model = model_of(http, completion.model)
    return respond(await build_completion_request(completion, arrival, model, prompts), model, CompletionFormatter)


def arrival_of(http: Request, services: Services) -> Arrival:
    """Return the facts about this request beside its body."""
    return Arrival(http.state.request_id, http.headers, services.api_keys.owner(http.state.key_number))


def respond(request: GenerationRequest, services: ModelServices, make_formatter: MakeFormatter) -> Response:
    """Return the response that generates, streamed if the client asked for that."""
    generation = Generation(request, services)
    if request.is_streamed:
        return EventStreamResponse(generation, make_formatter)
    return BodyResponse(generation, make_formatter)
