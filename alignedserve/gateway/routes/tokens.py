"""POST /tokenize and /detokenize."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.long_bodies.messages import Kind
from alignedserve.gateway.openai.parsing import parse
from alignedserve.gateway.openai.schemas.requests import DetokenizeRequest
from alignedserve.gateway.openai.token_answers import parse_tokenize, text_answer, tokens_answer
from alignedserve.gateway.routes.dependencies import ignored_fields_of, model_of, rate_limited_services
from alignedserve.gateway.routes.request_bodies import answer_to_long, parsed, receive

router = APIRouter()


@router.post("/tokenize", response_model=None)
async def tokenize(http: Request) -> Response:
    """Return the token ids of a text or a conversation, as generation would use them."""
    services = await rate_limited_services(http)
    ignored, raw = ignored_fields_of(http), await receive(http, services)
    answer = await answer_to_long(raw, Kind.TOKENIZE, services, ignored)
    if answer is None:
        asked = await parsed(raw, services, partial(parse_tokenize, ignored=ignored))
        answer = await tokens_answer(asked, model_of(http, asked.model))
    return JsonResponse(answer)


@router.post("/detokenize", response_model=None)
async def detokenize(http: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    services = await rate_limited_services(http)
    ignored, raw = ignored_fields_of(http), await receive(http, services)
    answer = await answer_to_long(raw, Kind.DETOKENIZE, services, ignored)
    if answer is None:
        asked = await parsed(raw, services, partial(parse, DetokenizeRequest, ignored=ignored))
        answer = await text_answer(asked, model_of(http, asked.model))
    return JsonResponse(answer)
