"""Builds the requests that the cluster serves from a checked body of the Messages API."""

from dataclasses import replace

from alignedserve.core.errors import ContextTooLong
from alignedserve.core.request import Request
from alignedserve.gateway.anthropic.chat_body import chat_body_of, sampling_fields
from alignedserve.gateway.anthropic.parsing import BodyParser
from alignedserve.gateway.anthropic.schemas import MessagesRequest, PromptFields
from alignedserve.gateway.models.model_services import ModelServices
from alignedserve.gateway.openai.parsing import parse_chat
from alignedserve.gateway.openai.prompt_encoding import encode_chat
from alignedserve.gateway.openai.request_builder import Arrival, GenerationRequest, build_chat_request
from alignedserve.gateway.openai.schemas.requests import ChatCompletionRequest
from alignedserve.gateway.work_lanes import rough_length


async def build_message_request(
    asked: MessagesRequest, parser: BodyParser, arrival: Arrival, services: ModelServices
) -> GenerationRequest:
    """Return the request of a message. Raises InvalidRequest.

    `max_tokens` may be more than the context has room for: then the answer ends where the context does.
    """
    length = rough_length(asked)
    chat_body = await services.lanes.run(length, lambda: chat_body_of(asked, parser))
    with chat_body.naming_own_fields():
        chat = await services.lanes.run(length, lambda: parse_chat(chat_body.fields | sampling_fields(asked)))
        try:
            request = await build_chat_request(chat, arrival, services)
        except ContextTooLong as error:
            raise await _prompt_too_long(chat, services, error.num_tokens) from error
    requests = tuple(_limited(one, asked.max_tokens) for one in request.requests)
    return replace(request, response_id=f"msg_{arrival.request_id}", requests=requests)


async def count_input_tokens(asked: PromptFields, parser: BodyParser, services: ModelServices) -> int:
    """Return the number of tokens of the prompt, however long. Raises InvalidRequest."""
    length = rough_length(asked)
    chat_body = await services.lanes.run(length, lambda: chat_body_of(asked, parser))
    with chat_body.naming_own_fields():
        return len(await encode_chat(await services.lanes.run(length, lambda: parse_chat(chat_body.fields)), services))


async def _prompt_too_long(
    chat: ChatCompletionRequest, services: ModelServices, num_tokens: int | None
) -> ContextTooLong:
    """Return the error in the words by which clients know that they must shorten their conversation.

    `num_tokens`: that it has at least; None: they are counted.
    """
    if num_tokens is None:
        num_tokens = len(await encode_chat(chat, services))
    limit = services.model.max_context_len - 1
    return ContextTooLong(f"prompt is too long: {num_tokens} tokens > {limit} maximum")


def _limited(request: Request, max_tokens: int) -> Request:
    limit = min(max_tokens, request.sampling.max_tokens)
    return replace(request, sampling=replace(request.sampling, max_tokens=limit))
