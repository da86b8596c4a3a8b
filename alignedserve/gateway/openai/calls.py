"""From a checked body to what is asked of the cluster and how its answer is written, for routes and batch lines."""

import asyncio
import time
from datetime import datetime
from typing import NamedTuple

from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.openai.request_builder import (
    Arrival,
    Plan,
    Prompt,
    known_token_ids,
    plan_chat,
    plan_completion,
)
from alignedserve.gateway.openai.response_format import Answer, ChatAnswer, CompletionAnswer, Envelope
from alignedserve.gateway.openai.schemas import ChatCompletionRequest, ChatMessage, CompletionRequest, GenerationFields
from alignedserve.gateway.services import Services

# Longer texts are tokenised in a thread, so that streams go on meanwhile.
_LONG_TEXT_LEN = 16_384


class Call(NamedTuple):
    """One generation, planned and not yet begun."""

    plan: Plan
    envelope: Envelope
    answer: Answer


async def chat_call(chat: ChatCompletionRequest, arrival: Arrival, services: Services) -> Call:
    """Plan a chat completion. Raises InvalidRequest."""
    services.check_model(chat.model)
    prompt = Prompt(await encode_chat(chat.messages, services))
    plan = plan_chat(chat, prompt, arrival, services)
    envelope = _envelope(f"chatcmpl-{arrival.request_id}", chat, plan, services, has_logprobs=chat.logprobs)
    return Call(plan, envelope, ChatAnswer(envelope, plan, services.tokenizer))


async def completion_call(completion: CompletionRequest, arrival: Arrival, services: Services) -> Call:
    """Plan a completion. Raises InvalidRequest."""
    services.check_model(completion.model)
    prompts = await _prompts_of(completion, services)
    plan = plan_completion(completion, prompts, arrival, services)
    envelope = _envelope(
        f"cmpl-{arrival.request_id}",
        completion,
        plan,
        services,
        has_logprobs=completion.logprobs is not None,
        echoes=completion.echo,
    )
    return Call(plan, envelope, CompletionAnswer(envelope, plan, services.tokenizer))


async def encode_chat(messages: list[ChatMessage], services: Services) -> tuple[int, ...]:
    """Token ids of a conversation. Raises InvalidRequest."""
    plain = [message.as_template_message() for message in messages]
    now = datetime.now()  # templates show the local date
    if sum(len(message["content"]) for message in plain) <= _LONG_TEXT_LEN:
        return tuple(services.tokenizer.encode_chat(plain, now=now))
    return tuple(await asyncio.to_thread(services.tokenizer.encode_chat, plain, now=now))


async def encode_text(text: str, services: Services, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Token ids of a text."""
    encode = services.tokenizer.encode
    if len(text) <= _LONG_TEXT_LEN:
        return tuple(encode(text, add_special_tokens=add_special_tokens))
    return tuple(await asyncio.to_thread(encode, text, add_special_tokens=add_special_tokens))


async def _prompts_of(completion: CompletionRequest, services: Services) -> list[Prompt]:
    prompt = completion.prompt
    if isinstance(prompt, str):
        return [await _text_prompt(prompt, services)]
    token_ids = [item for item in prompt if isinstance(item, int)]
    if token_ids:
        return [_token_prompt(token_ids, services)]
    if len(prompt) > services.config.max_concurrent_requests:
        raise InvalidRequest(f"More than {services.config.max_concurrent_requests} prompts.", param="prompt")
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    return [await _text_prompt(text, services) for text in texts] + [_token_prompt(one, services) for one in lists]


async def _text_prompt(text: str, services: Services) -> Prompt:
    token_ids = await encode_text(text, services)
    if not token_ids and services.tokenizer.bos_token_id is not None:
        token_ids = (services.tokenizer.bos_token_id,)  # an empty prompt begins a new document
    if not token_ids:
        raise InvalidRequest("prompt must hold at least one token: this model has no begin token.", param="prompt")
    return Prompt(token_ids, text)


def _token_prompt(token_ids: list[int], services: Services) -> Prompt:
    known = known_token_ids(token_ids, services)
    return Prompt(known, services.tokenizer.decode(known))


def _envelope(
    answer_id: str,
    fields: GenerationFields,
    plan: Plan,
    services: Services,
    *,
    has_logprobs: bool,
    echoes: bool = False,
) -> Envelope:
    return Envelope(
        answer_id=answer_id,
        created=int(time.time()),
        model=services.model.name,
        tier=plan.tier,
        has_logprobs=has_logprobs,
        includes_usage=fields.includes_usage,
        echoes=echoes,
    )
