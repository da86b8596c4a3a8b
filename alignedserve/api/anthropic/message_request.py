"""Builds the requests that the cluster serves from a checked body of the Messages API."""

from typing import Any

import orjson

from alignedserve.api.anthropic.chat_body import ChatBody, chat_body_of, sampling_fields
from alignedserve.api.anthropic.parsing import BodyParser
from alignedserve.api.anthropic.schemas import MessagesRequest, PromptFields
from alignedserve.api.models.chat_model import PromptServices
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation_request import Arrival, GenerationRequest
from alignedserve.api.openai.parsing import parse_chat
from alignedserve.api.openai.prompt_encoding import Prompts, chat_prompts, encode_chat
from alignedserve.api.openai.request_builder import build_chat_request
from alignedserve.api.openai.schemas.ignored_fields import IgnoredFields
from alignedserve.api.openai.schemas.requests import ChatCompletionRequest
from alignedserve.api.work_lanes import rough_length
from alignedserve.core.errors import ContextTooLong


async def build_message_request(
    asked: MessagesRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None = None
) -> GenerationRequest:
    """Return the request of a message. `prompts`: None: they are made here. Raises InvalidRequest.

    `max_tokens` may be more than the context has room for: then the answer ends where the context does.
    """
    chat_body, chat = await _translated(asked, arrival.ignored, services, sampling_fields(asked))
    with chat_body.naming_own_fields():
        (prompt,) = prompts = prompts or await _prompts(chat, services)
        try:
            response_id = f"msg_{arrival.request_id}"
            return await build_chat_request(
                chat, arrival, services, prompts, response_id=response_id, at_most=asked.max_tokens
            )
        except ContextTooLong as error:
            raise _prompt_too_long(len(prompt.token_ids), services) from error


async def message_prompts(asked: MessagesRequest, services: PromptServices, ignored: IgnoredFields | None) -> Prompts:
    """Return the one prompt of a message. Raises InvalidRequest."""
    chat_body, chat = await _translated(asked, ignored, services, sampling_fields(asked))
    with chat_body.naming_own_fields():
        return await _prompts(chat, services)


async def count_answer(asked: PromptFields, services: PromptServices, ignored: IgnoredFields | None) -> bytes:
    """Return the answer that has the number of tokens of the prompt, however long. Raises InvalidRequest."""
    chat_body, chat = await _translated(asked, ignored, services, {})
    with chat_body.naming_own_fields():
        return orjson.dumps({"input_tokens": len(await encode_chat(chat, services))})


async def _translated(
    asked: PromptFields, ignored: IgnoredFields | None, services: PromptServices, others: dict[str, Any]
) -> tuple[ChatBody, ChatCompletionRequest]:
    """Return the body as one of a chat completion, and that parsed with `others`. Raises InvalidRequest."""
    length = rough_length(asked)
    chat_body = await services.lanes.run(length, lambda: chat_body_of(asked, BodyParser(ignored)))
    with chat_body.naming_own_fields():
        chat = await services.lanes.run(length, lambda: parse_chat(chat_body.fields | others))
    return chat_body, chat


async def _prompts(chat: ChatCompletionRequest, services: PromptServices) -> Prompts:
    try:
        return await chat_prompts(chat, services)
    except ContextTooLong as error:
        raise _prompt_too_long(error.num_tokens, services) from error


def _prompt_too_long(num_tokens: int | None, services: PromptServices) -> ContextTooLong:
    """Return the error in the words by which clients know that they must shorten their conversation.

    `num_tokens`: that it has at least.
    """
    limit = services.model.max_context_len - 1
    return ContextTooLong(f"prompt is too long: {num_tokens} tokens > {limit} maximum")
