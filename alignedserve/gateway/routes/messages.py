"""POST /v1/messages and /v1/messages/count_tokens."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.gateway.anthropic.message_format import MessageFormatter
from alignedserve.gateway.anthropic.message_request import build_message_request, count_input_tokens
from alignedserve.gateway.anthropic.parsing import BodyParser
from alignedserve.gateway.anthropic.schemas import CountTokensRequest, MessagesRequest
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.routes.dependencies import ignored_fields_of, model_of, rate_limited_services, read_body
from alignedserve.gateway.routes.generate import arrival_of, respond

router = APIRouter()


@router.post("/v1/messages", response_model=None)
async def create_message(http: Request) -> Response:
    """Answer a conversation."""
    services = await rate_limited_services(http)
    arrival = arrival_of(http, services)
    parser = BodyParser(ignored_fields_of(http))
    asked = await read_body(http, services, partial(parser.fields, MessagesRequest))
    model = model_of(http, asked.model)
    request = await build_message_request(asked, parser, arrival, model)
    return respond(request, model, partial(MessageFormatter, asked=asked))


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(http: Request) -> Response:
    """Count the tokens of a prompt without answering it."""
    services = await rate_limited_services(http)
    parser = BodyParser(ignored_fields_of(http))
    asked = await read_body(http, services, partial(parser.fields, CountTokensRequest))
    num_tokens = await count_input_tokens(asked, parser, model_of(http, asked.model))
    return JsonResponse({"input_tokens": num_tokens})
