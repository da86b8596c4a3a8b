"""Builds the request that generates a response, for routes and for lines of batches."""

import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import orjson

from alignedserve.api.models.chat_model import PromptServices
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.generation_request import Arrival, GenerationRequest
from alignedserve.api.openai.parsing import parse_chat
from alignedserve.api.openai.prompt_encoding import Prompts, chat_prompts, encode_chat
from alignedserve.api.openai.request_builder import build_chat_request
from alignedserve.api.openai.schemas.requests import ChatCompletionRequest
from alignedserve.api.responses.chat_body import chat_body, name_as_asked, num_system_items
from alignedserve.api.responses.items import Item
from alignedserve.api.responses.schemas import CreateResponseRequest, PromptFields
from alignedserve.api.work_lanes import rough_length
from alignedserve.core.errors import ContextTooLong, InvalidRequest

T = TypeVar("T")


def new_response_id() -> str:
    """Make a random id of a response that cannot be guessed."""
    return f"resp_{secrets.token_hex(16)}"


async def build_response_request(
    asked: CreateResponseRequest, items: Sequence[Item], response_id: str, arrival: Arrival, services: ModelServices
) -> GenerationRequest:
    """Return the request for a response to these items, earlier turns first. Raises InvalidRequest."""

    async def build(kept: Sequence[Item]) -> GenerationRequest:
        chat = await _translated(asked, kept, services)
        return await build_chat_request(chat, arrival, services, response_id=response_id)

    with _named_as_asked():
        is_truncated = asked.truncation == "auto"
        return await (build_truncated(build, items) if is_truncated else build(items))


async def response_prompts(asked: CreateResponseRequest, items: Sequence[Item], services: PromptServices) -> Prompts:
    """Return the one prompt of these items. Raises InvalidRequest."""
    with _named_as_asked():
        return await chat_prompts(await _translated(asked, items, services), services)


async def input_tokens_answer(asked: PromptFields, items: Sequence[Item], services: PromptServices) -> bytes:
    """Return the answer that has the length of the prompt in tokens. Raises InvalidRequest."""
    with _named_as_asked():
        token_ids = await encode_chat(await _translated(asked, items, services), services)
    return orjson.dumps({"object": "response.input_tokens", "input_tokens": len(token_ids)})


async def _translated(asked: PromptFields, items: Sequence[Item], services: PromptServices) -> ChatCompletionRequest:
    model = {"model": services.model.name}
    return await services.lanes.run(rough_length(items), lambda: parse_chat(chat_body(asked, items) | model))


@contextmanager
def _named_as_asked() -> Iterator[None]:
    """Name fields in errors of the chat completion as the client knows them."""
    try:
        yield
    except InvalidRequest as error:
        error.param = None if error.param is None else name_as_asked(error.param)
        error.args = (name_as_asked(str(error)),)
        raise


async def build_truncated(build: Callable[[Sequence[Item]], Awaitable[T]], items: Sequence[Item]) -> T:
    """Return what is built from most turns, found by halving. Raises ContextTooLong if the last one is too long.

    A turn begins with a message of the user, so that no call loses its output. System messages at the beginning stay.
    """
    num_kept = num_system_items(items)
    starts = [num_kept] + [place for place in range(num_kept + 1, len(items)) if items[place].get("role") == "user"]

    async def build_from(turn: int) -> T:
        return await build([*items[:num_kept], *items[starts[turn] :]])

    try:
        return await build(items)
    except ContextTooLong:
        too_early, fitting = 0, len(starts) - 1
    built = await build_from(fitting)
    while fitting - too_early > 1:
        middle = (too_early + fitting) // 2
        try:
            built, fitting = await build_from(middle), middle
        except ContextTooLong:
            too_early = middle
    return built
