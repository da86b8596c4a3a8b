"""POST /v1/chat/completions and /v1/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.gateway.openai.calls import Call, chat_call, completion_call
from alignedserve.gateway.openai.generation import Generation
from alignedserve.gateway.openai.parsing import parse_chat, parse_completion, read_json
from alignedserve.gateway.openai.request_builder import Arrival, new_arrival
from alignedserve.gateway.openai.schemas import GenerationFields
from alignedserve.gateway.openai.streaming import BodyResponse, EventStreamResponse
from alignedserve.gateway.services import Services, services_of

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(http: Request) -> Response:
    """Answer a conversation."""
    services, arrival = _admit(http)
    chat = parse_chat(await read_json(http, services.config))
    return _respond(chat, await chat_call(chat, arrival, services), services)


@router.post("/v1/completions", response_model=None)
async def create_completion(http: Request) -> Response:
    """Continue one prompt or several."""
    services, arrival = _admit(http)
    completion = parse_completion(await read_json(http, services.config))
    return _respond(completion, await completion_call(completion, arrival, services), services)


def _admit(http: Request) -> tuple[Services, Arrival]:
    services = services_of(http)
    services.keys.spend(http.state.key_number)
    return services, new_arrival(http.state.request_id, http.headers)


def _respond(fields: GenerationFields, call: Call, services: Services) -> Response:
    generation = Generation(call.plan, services)
    if fields.stream:
        return EventStreamResponse(generation, call.answer, call.envelope)
    return BodyResponse(generation, call.answer)
