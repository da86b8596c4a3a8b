"""Tokenizes prompts and conversations; long ones in a thread, so that streams continue meanwhile."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.openai.chat_prompt import chat_prompt
from alignedserve.gateway.openai.schemas.requests import ConversationFields, PromptForms
from alignedserve.gateway.services import Services

_LONG_TEXT_LEN = 16_384


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as token ids and as text."""

    token_ids: tuple[int, ...]
    text: str = ""  # repeated by `echo`


async def encode_chat(fields: ConversationFields, services: Services) -> tuple[int, ...]:
    """Return the token ids of a conversation that was checked. Raises InvalidRequest."""
    prompt = chat_prompt(fields, services)
    encode = partial(services.tokenizer.encode_chat, now=datetime.now(), **prompt._asdict())  # templates show the date
    if sum(len(message["content"]) for message in prompt.messages) + len(str(prompt.tools)) <= _LONG_TEXT_LEN:
        return tuple(encode())
    return tuple(await asyncio.to_thread(encode))


async def encode_text(text: str, services: Services, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Return the token ids of a text."""
    encode = services.tokenizer.encode
    if len(text) <= _LONG_TEXT_LEN:
        return tuple(encode(text, add_special_tokens=add_special_tokens))
    return tuple(await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens))


async def encode_prompts(
    prompt: PromptForms, services: Services, *, param: str = "prompt", add_special_tokens: bool = True
) -> list[Prompt]:
    """Return the prompts of a completion or of embeddings, whatever form they were sent in.

    Raises InvalidRequest naming `param`.
    """
    if isinstance(prompt, str):
        return [await _text_prompt(prompt, services, param, add_special_tokens)]
    token_ids = [item for item in prompt if isinstance(item, int)]
    if token_ids:
        return [_token_prompt(token_ids, services, param)]
    if len(prompt) > services.config.max_concurrent_requests:
        raise InvalidRequest(f"{param} holds more than {services.config.max_concurrent_requests} texts.", param=param)
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    of_texts = [await _text_prompt(text, services, param, add_special_tokens) for text in texts]
    return of_texts + [_token_prompt(one, services, param) for one in lists]


def check_token_ids(token_ids: Sequence[int], services: Services, *, param: str = "prompt") -> tuple[int, ...]:
    """Return these ids if the vocabulary has all of them. Raises InvalidRequest."""
    known_ids = range(services.tokenizer.vocab_size)
    if any(token_id not in known_ids for token_id in token_ids):
        raise InvalidRequest(f"{param} holds an id outside the vocabulary (0 to {len(known_ids) - 1}).", param=param)
    return tuple(token_ids)


async def _text_prompt(text: str, services: Services, param: str, add_special_tokens: bool) -> Prompt:
    token_ids = await encode_text(text, services, add_special_tokens=add_special_tokens)
    if not token_ids and services.tokenizer.bos_token_id is not None:
        token_ids = (services.tokenizer.bos_token_id,)  # an empty prompt begins a new document
    if not token_ids:
        raise InvalidRequest(f"{param} must hold at least one token: this model has no begin token.", param=param)
    return Prompt(token_ids, text)


def _token_prompt(token_ids: list[int], services: Services, param: str) -> Prompt:
    known = check_token_ids(token_ids, services, param=param)
    return Prompt(known, services.tokenizer.decode(known))
