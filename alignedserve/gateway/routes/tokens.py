"""POST /tokenize and /detokenize."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.openai.parsing import parse
from alignedserve.api.openai.schemas.requests import DetokenizeRequest, TokenizeRequest
from alignedserve.api.openai.token_answers import parse_tokenize, text_answer, tokens_answer
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.long_bodies.messages import Kind
from alignedserve.gateway.routes.dependencies import ignored_fields_of, model_of, rate_limited_services
from alignedserve.gateway.routes.request_bodies import read_and_answer

router = APIRouter()


@router.post("/tokenize", response_model=None)
async def tokenize(http: Request) -> Response:
    """Return the token ids of a text or a conversation, as generation would use them."""
    services = await rate_limited_services(http)
    ignored = ignored_fields_of(http)

    async def answer(asked: TokenizeRequest) -> bytes:
        return await tokens_answer(asked, model_of(http, asked.model))

    check = partial(parse_tokenize, ignored=ignored)
    return JsonResponse(await read_and_answer(http, Kind.TOKENIZE, services, check, ignored, answer))


@router.post("/detokenize", response_model=None)
async def detokenize(http: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    services = await rate_limited_services(http)
    ignored = ignored_fields_of(http)

    async def answer(asked: DetokenizeRequest) -> bytes:
        return await text_answer(asked, model_of(http, asked.model))

    check = partial(parse, DetokenizeRequest, ignored=ignored)
    return JsonResponse(await read_and_answer(http, Kind.DETOKENIZE, services, check, ignored, answer))
