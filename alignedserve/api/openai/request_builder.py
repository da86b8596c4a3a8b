"""Builds the requests that the cluster serves from a checked body, for routes and for lines of batches."""

import asyncio
import hashlib
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from alignedserve.api.models.model_card import ChatModel
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.chat_grammar import answer_grammar, chat_grammar
from alignedserve.api.openai.chat_prompt import chat_output_format, note_effort
from alignedserve.api.openai.generation_request import Arrival, CallTerms, GenerationRequest, trial_turn
from alignedserve.api.openai.output_parser import OutputFormat, TextOptions
from alignedserve.api.openai.prompt_encoding import (
    Prompt,
    Prompts,
    chat_prompts,
    check_token_ids,
    completion_prompts,
    param_at,
)
from alignedserve.api.openai.schemas.requests import ChatCompletionRequest, CompletionRequest, GenerationFields
from alignedserve.api.work_lanes import rough_length
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.keep_alive import parse_keep_alive
from alignedserve.core.request import Request, SamplingParams
from alignedserve.runtime.grammar.compiler import with_free_blanks
from alignedserve.runtime.grammar.trials import ALONE, TrialTurn
from alignedserve.text.tokenizer import Tokenizer

NumberT = TypeVar("NumberT", int, float)
_TOKEN_ID = re.compile(r"\d{1,9}", re.ASCII)
_DEFAULT_COMPLETION_TOKENS = 16


class _Answer(NamedTuple):
    id_prefix: str
    prompt_param: str  # the field that the prompt is in
    max_tokens: int | None
    num_logprobs: int | None
    grammar: str  # what the answer must match; empty: anything
    default_max_tokens: int | None = None  # at most the rest of the context; None: all of it
    num_prompt_logprobs: int | None = None
    echoes: bool = False
    output_format: OutputFormat = OutputFormat()
    calls_functions: bool = False


class PreparedChat(NamedTuple):
    """A conversation as the model gets it, and how its answer is decoded and read."""

    prompt: tuple[int, ...]
    output_format: OutputFormat
    grammar: str  # what the answer is decoded under; empty: anything


async def prepare_chat(
    chat: ChatCompletionRequest, prompt: tuple[int, ...], model: ChatModel, turn: TrialTurn = ALONE
) -> PreparedChat:
    """Return an encoded conversation with the form and the grammar of its answer. Raises InvalidRequest."""
    output_format = chat_output_format(chat, prompt, model)
    return PreparedChat(prompt, output_format, await chat_grammar(chat, output_format, model, turn))


async def build_chat_request(
    chat: ChatCompletionRequest,
    arrival: Arrival,
    services: ModelServices,
    prompts: Prompts | None = None,
    *,
    response_id: str | None = None,
    at_most: int | None = None,
    effort_name: str = "reasoning_effort",
) -> GenerationRequest:
    """Return the requests of a chat completion. `prompts`: None: they are made here. Raises InvalidRequest.

    `response_id`: None: one is made. `at_most`: tokens of an answer without a limit of its own, if the context has
    room for them. `effort_name`: what the client calls `reasoning_effort`.
    """
    (prompt,) = prompts or await chat_prompts(chat, services)
    if chat.top_logprobs and not chat.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    max_tokens = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    if chat.max_tokens is not None and max_tokens != chat.max_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ.", param="max_tokens")
    note_effort(chat, services, arrival.ignored, effort_name)
    prepared = await prepare_chat(chat, prompt.token_ids, services, trial_turn(chat, arrival))
    answer = _Answer(
        id_prefix="chatcmpl-",
        prompt_param="messages",
        max_tokens=max_tokens,
        num_logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        grammar=prepared.grammar,
        default_max_tokens=at_most,
        output_format=prepared.output_format,
        calls_functions=bool(chat.functions),
    )
    return await _build(chat, (prompt,), arrival, services, answer, response_id)


async def build_completion_request(
    completion: CompletionRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None = None
) -> GenerationRequest:
    """Return the requests of a completion. `prompts`: None: they are made here. Raises InvalidRequest."""
    prompts = prompts or await completion_prompts(completion, services)
    if completion.max_tokens == 0 and not completion.echo and completion.prompt_logprobs is None:
        raise InvalidRequest("max_tokens must be at least 1, or echo must be true.", param="max_tokens")
    answer = _Answer(
        id_prefix="cmpl-",
        prompt_param="prompt",
        max_tokens=completion.max_tokens,
        num_logprobs=completion.logprobs,
        grammar=await answer_grammar(completion, services, trial_turn(completion, arrival)),
        default_max_tokens=_DEFAULT_COMPLETION_TOKENS,
        num_prompt_logprobs=completion.logprobs if completion.echo else None,
        echoes=completion.echo,
        output_format=OutputFormat(is_continued=True),
    )
    return await _build(completion, prompts, arrival, services, answer)


async def _build(
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    arrival: Arrival,
    services: ModelServices,
    answer: _Answer,
    response_id: str | None = None,
) -> GenerationRequest:
    _check_limits(fields, len(prompts), services.config)
    if fields.truncate_prompt_tokens is not None:
        prompts = [_truncated(prompt, fields.truncate_prompt_tokens, answer.max_tokens, services) for prompt in prompts]
    terms = CallTerms.of(fields, arrival, services)
    services.uses.keep_alive_s = _keep_alive_s(fields)
    return GenerationRequest(
        response_id=response_id or answer.id_prefix + arrival.request_id,
        arrival=arrival,
        model=services.model.name,
        requests=await _requests(fields, prompts, services, terms, answer),
        prompts=tuple(prompts),
        stop_strings=tuple(fields.stop),
        service_tier=terms.tier.name,
        is_streamed=fields.stream,
        has_logprobs=answer.num_logprobs is not None,
        includes_usage=fields.includes_usage,
        has_continuous_usage=fields.has_continuous_usage,
        echoes=answer.echoes,
        output_format=answer.output_format,
        text_options=TextOptions(
            fields.include_stop_str_in_output, not fields.skip_special_tokens, fields.return_token_ids
        ),
        has_token_ids=fields.return_token_ids,
        calls_functions=answer.calls_functions,
        num_prompt_logprobs=fields.prompt_logprobs,
        names_tokens_by_id=fields.return_tokens_as_token_ids,
        named_slo=terms.slo,
    )


def _truncated(prompt: Prompt, num_tokens: int, max_tokens: int | None, services: ModelServices) -> Prompt:
    if num_tokens == -1:
        num_tokens = max(services.model.max_context_len - (max_tokens or 1), 1)
    if num_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or above 0.", param="truncate_prompt_tokens")
    if len(prompt.token_ids) <= num_tokens:
        return prompt
    if prompt.pictures:
        raise InvalidRequest(
            "truncate_prompt_tokens is not supported with pictures.",
            param="truncate_prompt_tokens",
            code="unsupported_parameter",
        )
    token_ids = prompt.token_ids[-num_tokens:]
    return Prompt(token_ids, services.tokenizer.decode(token_ids))


def _check_limits(fields: GenerationFields, num_prompts: int, config: GatewayConfig) -> None:
    if fields.n > config.max_choices:
        raise InvalidRequest(f"n must be at most {config.max_choices}.", param="n")
    if len(fields.stop) > config.max_stop_strings:
        raise InvalidRequest(f"stop must hold at most {config.max_stop_strings} strings.", param="stop")
    if fields.n * num_prompts > config.max_concurrent_requests:
        raise InvalidRequest(f"More than {config.max_concurrent_requests} choices in one request.", param="prompt")
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not supported with stream.", param="prompt_logprobs")


async def _requests(
    fields: GenerationFields, prompts: Sequence[Prompt], services: ModelServices, terms: CallTerms, answer: _Answer
) -> tuple[Request, ...]:
    seed = fields.seed if fields.seed is not None else secrets.randbits(63)
    max_context_len = services.model.max_context_len
    limits = []
    for place, prompt in enumerate(prompts):
        named = param_at(answer.prompt_param, place, of=len(prompts))
        limits.append(_max_tokens(len(prompt.token_ids), max_context_len, answer, param=named))
    # What lists name is read once for all prompts: of 256 bad words alone that takes milliseconds.
    length = rough_length([fields.bad_words, fields.allowed_token_ids, fields.logit_bias])
    shared = await services.lanes.run(length, partial(_sampling_params, fields, limits[0], services, answer))
    requests: list[Request] = []
    for prompt, max_tokens in zip(prompts, limits, strict=True):
        for choice in range(fields.n):
            sampling = replace(shared, max_tokens=max_tokens, seed=choice_seed(seed, choice))
            requests.append(terms.request(len(requests), prompt, sampling))
        if len(requests) < len(prompts) * fields.n:
            await asyncio.sleep(0)  # streams continue between prompts
    return tuple(requests)


def _sampling_params(
    fields: GenerationFields, max_tokens: int, services: ModelServices, answer: _Answer
) -> SamplingParams:
    defaults = services.model.sampling
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        temperature=_given(fields.temperature, defaults.temperature),
        top_p=_given(fields.top_p, defaults.top_p),
        top_k=max(_given(fields.top_k, defaults.top_k), 0),
        min_p=_given(fields.min_p, defaults.min_p),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=_given(fields.repetition_penalty, defaults.repetition_penalty),
        ignore_eos=fields.ignore_eos,
        stop_token_ids=check_token_ids(fields.stop_token_ids, services, param="stop_token_ids"),
        logit_bias=_logit_bias(fields, services),
        allowed_token_ids=allowed_token_ids(fields, services),
        bad_words=bad_words(fields.bad_words, services.tokenizer),
        num_logprobs=answer.num_logprobs,
        num_prompt_logprobs=_highest(answer.num_prompt_logprobs, fields.prompt_logprobs),
        grammar=with_free_blanks(answer.grammar) if fields.has_free_blanks else answer.grammar,
    )


def _keep_alive_s(fields: GenerationFields) -> float | None:
    try:
        return None if fields.keep_alive is None else parse_keep_alive(fields.keep_alive)
    except ValueError as error:
        raise InvalidRequest(f"keep_alive {error}.", param="keep_alive") from error


def _given(value: NumberT | None, default: NumberT) -> NumberT:
    return default if value is None else value


def _max_tokens(prompt_len: int, max_context_len: int, answer: _Answer, *, param: str) -> int:
    rest = max_context_len - prompt_len
    default = rest if answer.default_max_tokens is None else min(rest, answer.default_max_tokens)
    max_tokens = default if answer.max_tokens is None else answer.max_tokens
    if max_tokens > rest or (answer.max_tokens is None and rest < 1):
        asked = "at least 1" if answer.max_tokens is None else str(answer.max_tokens)
        place = "the prompt" if param == answer.prompt_param else param
        raise ContextTooLong(
            f"This model's maximum context length is {max_context_len} tokens. However, you requested {prompt_len} "
            f"tokens in {place} and {asked} in the answer. Please shorten one of them.",
            param=param,
        )
    return max_tokens


def _highest(first: int | None, second: int | None) -> int | None:
    return second if first is None else max(first, second or 0)


def _logit_bias(fields: GenerationFields, services: ModelServices) -> tuple[tuple[int, float], ...]:
    if not all(_TOKEN_ID.fullmatch(key) for key in fields.logit_bias):
        raise InvalidRequest("logit_bias must map token ids to numbers.", param="logit_bias")
    token_ids = check_token_ids([int(key) for key in fields.logit_bias], services, param="logit_bias")
    return tuple(zip(token_ids, fields.logit_bias.values(), strict=True))


def choice_seed(seed: int, choice: int) -> int:
    """Return the client's own seed for the first choice and one derived from it for each other."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def allowed_token_ids(fields: GenerationFields, services: ModelServices) -> tuple[int, ...]:
    """Return the tokens that may be chosen, each once; empty: all. Raises InvalidRequest."""
    param = "allowed_token_ids"
    allowed = check_token_ids(list(dict.fromkeys(fields.allowed_token_ids)), services, param=param)
    if not fields.min_tokens or not allowed:
        return allowed
    stops = {*fields.stop_token_ids, *(() if fields.ignore_eos else services.model.eos_token_ids)}
    if stops.issuperset(allowed):
        raise InvalidRequest(f"{param} must hold more than end tokens where min_tokens is set.", param=param)
    return allowed


def bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the words as the tokens that they are at the beginning of a text and after a space."""
    return tuple(dict.fromkeys(token_ids for word in words for token_ids in _forms(word, tokenizer)))


def _forms(word: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
    spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
    if bare:
        yield bare
    if spaced and (not bare or spaced[-len(bare) :] != bare):  # else a space is a token of its own
        yield spaced
