"""The answers of /tokenize and /detokenize, as JSON."""

from typing import Any

import orjson

from alignedserve.api.models.chat_model import PromptServices
from alignedserve.api.openai.conversation import checked_conversation
from alignedserve.api.openai.parsing import parse, plain_messages
from alignedserve.api.openai.prompt_encoding import decode_text, encode_chat, encode_text
from alignedserve.api.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.api.openai.schemas.requests import DetokenizeRequest, TokenizeRequest
from alignedserve.core.errors import InvalidRequest


def parse_tokenize(body: dict[str, Any], ignored: IgnoredFields | None = None) -> TokenizeRequest:
    """Check the body of /tokenize; `ignored` as `parse` takes it. Raises InvalidRequest naming the field."""
    asked = parse(TokenizeRequest, plain_messages(body), ignored)
    return asked if asked.prompt is not None else checked_conversation(asked)


async def tokens_answer(asked: TokenizeRequest, services: PromptServices) -> bytes:
    """Return the token ids of a text or a conversation, as generation would use them. Raises InvalidRequest."""
    if (asked.prompt is None) == (not asked.messages):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if asked.prompt is None:
        token_ids = await encode_chat(asked, services)
    else:
        token_ids = await encode_text(asked.prompt, services, add_special_tokens=asked.add_special_tokens)
    answer = {"count": len(token_ids), "max_model_len": services.model.max_context_len, "tokens": token_ids}
    return orjson.dumps(answer)


async def text_answer(asked: DetokenizeRequest, services: PromptServices) -> bytes:
    """Return the text of token ids, special tokens included. Raises InvalidRequest."""
    return orjson.dumps({"prompt": await decode_text(asked.tokens, services)})
