"""POST /v1/messages and /v1/messages/count_tokens."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.anthropic.message_format import MessageFormatter
from alignedserve.api.anthropic.message_request import build_message_request, count_answer
from alignedserve.api.anthropic.parsing import BodyParser
from alignedserve.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.long_bodies.messages import Kind
from alignedserve.gateway.routes.dependencies import ignored_fields_of, model_of, rate_limited_services
from alignedserve.gateway.routes.generate import arrival_of, respond
from alignedserve.gateway.routes.request_bodies import read_and_answer, read_prompts

router = APIRouter()


@router.post("/v1/messages", response_model=None)
async def create_message(http: Request) -> Response:
    """Answer a conversation."""
    services = await rate_limited_services(http)
    arrival = arrival_of(http, services)
    ignored = ignored_fields_of(http)
    parser = BodyParser(ignored)
    parse = partial(parser.fields, MessagesRequest)
    asked, prompts = await read_prompts(http, Kind.MESSAGE, services, parse, ignored)
    model = model_of(http, asked.model)
    request = await build_message_request(asked, parser, arrival, model, prompts)
    return respond(request, model, partial(MessageFormatter, asked=asked))


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(http: Request) -> Response:
    """Count the tokens of a prompt without answering it."""
    services = await rate_limited_services(http)
    ignored = ignored_fields_of(http)
    parser = BodyParser(ignored)

    async def answer(asked: CountTokensRequest) -> bytes:
        return await count_answer(asked, parser, model_of(http, asked.model))

    parse = partial(parser.fields, CountTokensRequest)
    return JsonResponse(await read_and_answer(http, Kind.MESSAGE_COUNT, services, parse, ignored, answer))
