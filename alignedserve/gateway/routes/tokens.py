"""POST /tokenize and /detokenize."""

from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.openai.functions import checked_conversation
from alignedserve.gateway.openai.parsing import parse, plain_messages
from alignedserve.gateway.openai.prompt_encoding import decode_text, encode_chat, encode_text
from alignedserve.gateway.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.gateway.openai.schemas.requests import DetokenizeRequest, TokenizeRequest
from alignedserve.gateway.routes.dependencies import ignored_fields_of, model_of, rate_limited_services, read_body

router = APIRouter()


@router.post("/tokenize", response_model=None)
async def tokenize(http: Request) -> Response:
    """Return the token ids of a text or a conversation, as generation would use them."""
    services = await rate_limited_services(http)
    asked = await read_body(http, services, partial(_parse_tokenize, ignored=ignored_fields_of(http)))
    model = model_of(http, asked.model)
    if (asked.prompt is None) == (not asked.messages):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if asked.prompt is None:
        token_ids = await encode_chat(asked, model)
    else:
        token_ids = await encode_text(asked.prompt, model, add_special_tokens=asked.add_special_tokens)
    answer = {"count": len(token_ids), "max_model_len": model.model.max_context_len, "tokens": token_ids}
    return JsonResponse(answer)


@router.post("/detokenize", response_model=None)
async def detokenize(http: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    services = await rate_limited_services(http)
    asked = await read_body(http, services, partial(parse, DetokenizeRequest, ignored=ignored_fields_of(http)))
    model = model_of(http, asked.model)
    text = await decode_text(asked.tokens, model)
    return JsonResponse({"prompt": text})


def _parse_tokenize(body: dict[str, Any], ignored: IgnoredFields | None) -> TokenizeRequest:
    asked = parse(TokenizeRequest, plain_messages(body), ignored)
    return asked if asked.prompt is not None else checked_conversation(asked)
