"""POST /tokenize and /detokenize."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.openai.conversation import check_messages
from alignedserve.gateway.openai.parsing import parse, plain_messages, read_json
from alignedserve.gateway.openai.prompt_encoding import check_token_ids, encode_chat, encode_text
from alignedserve.gateway.openai.schemas.requests import DetokenizeRequest, TokenizeRequest
from alignedserve.gateway.openai.schemas.tools import check_tools
from alignedserve.gateway.routes.dependencies import ignored_fields_of, rate_limited_services

router = APIRouter()


@router.post("/tokenize", response_model=None)
async def tokenize(http: Request) -> Response:
    """Return the token ids of a text or a conversation, as generation would use them."""
    services = await rate_limited_services(http)
    body = plain_messages(await read_json(http, services.config))
    asked = parse(TokenizeRequest, body, ignored_fields_of(http))
    services.check_model(asked.model)
    if (asked.prompt is None) == (not asked.messages):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if asked.prompt is None:
        check_messages(asked.messages)
        check_tools(asked.tools, asked.tool_choice)
        token_ids = await encode_chat(asked, services)
    else:
        token_ids = await encode_text(asked.prompt, services, add_special_tokens=asked.add_special_tokens)
    answer = {"count": len(token_ids), "max_model_len": services.model.max_context_len, "tokens": token_ids}
    return JsonResponse(answer)


@router.post("/detokenize", response_model=None)
async def detokenize(http: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    services = await rate_limited_services(http)
    asked = parse(DetokenizeRequest, await read_json(http, services.config), ignored_fields_of(http))
    services.check_model(asked.model)
    token_ids = check_token_ids(asked.tokens, services, param="tokens")
    text = services.tokenizer.decode(token_ids, skip_special_tokens=False)
    return JsonResponse({"prompt": text})
