"""Tokenizes prompts and conversations; long ones beside the loop, so that streams continue meanwhile."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from alignedserve.api.conversation import Conversation
from alignedserve.api.models.model_card import PromptServices
from alignedserve.api.openai.bodies import CompletionRequest, PromptForms
from alignedserve.api.openai.chat_prompt import chat_prompt
from alignedserve.api.work_lanes import rough_length
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.picture import Picture
from alignedserve.text.tokenizer import check_length

_TOKEN_LEN = 4  # what a token costs that is decoded, in characters of text


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids and as text."""

    token_ids: tuple[int, ...]
    text: str = ""  # repeated by `echo`
    second_text_at: int = 0  # as in Request
    pictures: tuple[Picture, ...] = ()  # likewise


Prompts = tuple[Prompt, ...]


async def encode_chat(conversation: Conversation, services: PromptServices, *, is_bounded: bool = False) -> Prompt:
    """Return the prompt of a conversation that was checked. Raises InvalidRequest.

    `is_bounded`: a conversation that cannot fit the context is refused before it is tokenized, with ContextTooLong.
    """
    services.model.require_generation(conversation.names.messages)
    pictures = await services.pictures.read(conversation, services.model.picture_form, services.config, services.lanes)
    texts = () if pictures is None else pictures.texts
    limit = services.model.max_context_len if is_bounded else None

    def encode() -> Prompt:
        prompt = chat_prompt(conversation, services, texts)
        # Templates show the date.
        token_ids = tuple(services.tokenizer.encode_chat(prompt, now=datetime.now(), max_tokens=limit))
        return Prompt(token_ids, pictures=() if pictures is None else pictures.placed(token_ids, prompt.param))

    return await services.lanes.run(rough_length((conversation.messages, conversation.tools)), encode)


async def completion_prompts(completion: CompletionRequest, services: PromptServices) -> Prompts:
    services.model.require_generation("prompt")
    prompts = await encode_prompts(
        completion.prompt,
        services,
        add_special_tokens=completion.add_special_tokens,
        is_bounded=completion.truncate_prompt_tokens is None,
    )
    return tuple(prompts)


async def encode_text(
    text: str, services: PromptServices, *, add_special_tokens: bool = True, param: str | None = None
) -> tuple[int, ...]:
    """Return the token ids of a text.

    `param`: the field of a text that is refused, before it is tokenized, if it cannot fit the context; None: none is.
    """
    limit = services.model.max_context_len if param is not None else None
    if param is not None:
        check_length(services.tokenizer.least_tokens(text), limit, param=param)

    def encode() -> tuple[int, ...]:
        return tuple(services.tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=limit))

    return await services.lanes.run(len(text), encode)


async def decode_text(token_ids: list[int], services: PromptServices) -> str:
    """Return the text of token ids, special tokens included. Raises InvalidRequest."""

    def decode() -> str:
        known = check_token_ids(token_ids, services, param="tokens")
        return services.tokenizer.decode(known, skip_special_tokens=False)

    return await services.lanes.run(len(token_ids) * _TOKEN_LEN, decode)


def param_at(param: str, index: int, *, of: int) -> str:
    """Return how errors name one of several prompts of a field: `prompt[3]`; a single one is the field itself."""
    return f"{param}[{index}]" if of > 1 else param


async def encode_prompts(
    prompt: PromptForms,
    services: PromptServices,
    *,
    param: str = "prompt",
    add_special_tokens: bool = True,
    is_bounded: bool = True,
) -> list[Prompt]:
    """Return the prompts of a completion or of embeddings, whatever form they were sent in.

    `is_bounded`: False: only a part of each will be read, so that it may be longer than the context. Raises
    InvalidRequest naming `param`.
    """
    if isinstance(prompt, str):
        return [await _text_prompt(prompt, services, param, add_special_tokens, is_bounded=is_bounded)]
    if isinstance(prompt[0], int):
        token_ids = [item for item in prompt if isinstance(item, int)]
        return [await _token_prompt(token_ids, services, param, is_bounded=is_bounded)]
    if len(prompt) > services.config.max_concurrent_requests:
        raise InvalidRequest(f"{param} holds more than {services.config.max_concurrent_requests} texts.", param=param)
    prompts = []
    for index, item in enumerate(prompt):
        item_param = param_at(param, index, of=len(prompt))
        if isinstance(item, str):
            prompts.append(await _text_prompt(item, services, item_param, add_special_tokens, is_bounded=is_bounded))
        elif isinstance(item, list):
            prompts.append(await _token_prompt(item, services, item_param, is_bounded=is_bounded))
        await asyncio.sleep(0)  # streams continue between prompts that are not long
    return prompts


def check_token_ids(token_ids: Sequence[int], services: PromptServices, *, param: str = "prompt") -> tuple[int, ...]:
    """Return these ids if the vocabulary has all of them. Raises InvalidRequest."""
    known_ids = range(services.tokenizer.vocab_size)
    if any(token_id not in known_ids for token_id in token_ids):
        raise InvalidRequest(f"{param} holds an id outside the vocabulary (0 to {len(known_ids) - 1}).", param=param)
    return tuple(token_ids)


async def _text_prompt(
    text: str, services: PromptServices, param: str, add_special_tokens: bool, *, is_bounded: bool
) -> Prompt:
    bounded_param = param if is_bounded else None
    token_ids = await encode_text(text, services, add_special_tokens=add_special_tokens, param=bounded_param)
    if not token_ids and services.tokenizer.bos_token_id is not None:
        token_ids = (services.tokenizer.bos_token_id,)  # an empty prompt begins a new document
    if not token_ids:
        raise InvalidRequest(f"{param} must hold at least one token: this model has no begin token.", param=param)
    return Prompt(token_ids, text)


async def _token_prompt(token_ids: list[int], services: PromptServices, param: str, *, is_bounded: bool) -> Prompt:
    if is_bounded:
        check_length(len(token_ids), services.model.max_context_len, param=param)

    def decode() -> Prompt:
        known = check_token_ids(token_ids, services, param=param)
        return Prompt(known, services.tokenizer.decode(known))

    return await services.lanes.run(len(token_ids) * _TOKEN_LEN, decode)
