"""Builds the requests that the cluster serves from a checked body, for routes and for lines of batches."""

import hashlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.chat_grammar import chat_grammar
from alignedserve.api.openai.chat_prompt import chat_output_format
from alignedserve.api.openai.output_parser import OutputFormat
from alignedserve.api.openai.prompt_encoding import (
    Prompt,
    Prompts,
    chat_prompts,
    check_token_ids,
    completion_prompts,
)
from alignedserve.api.openai.schemas.requests import ChatCompletionRequest, CompletionRequest, GenerationFields
from alignedserve.api.openai.slo_headers import DEADLINE_HEADER, TPOT_HEADER, TTFT_HEADER, parse_slo
from alignedserve.api.openai.structured_output import answer_grammar
from alignedserve.api.openai.text_options import TextOptions
from alignedserve.api.openai.token_limits import allowed_token_ids, bad_words
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, SamplingParams, Slo

_TOKEN_ID = re.compile(r"\d{1,9}", re.ASCII)
_DEFAULT_COMPLETION_TOKENS = 16


class ServiceTier(NamedTuple):
    """Scheduling class and priority of a `service_tier`."""

    name: str  # as the response names it
    request_class: RequestClass
    priority: int


SERVICE_TIERS = {
    "auto": ServiceTier("default", RequestClass.REAL_TIME, 0),
    "default": ServiceTier("default", RequestClass.REAL_TIME, 0),
    "priority": ServiceTier("priority", RequestClass.REAL_TIME, -1),
    "fast": ServiceTier("priority", RequestClass.REAL_TIME, -1),
    "flex": ServiceTier("flex", RequestClass.BEST_EFFORT, 0),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """Facts about an HTTP request or batch line beside its body."""

    request_id: str
    headers: Mapping[str, str]
    tenant: str  # the client whose key it came with (ApiKeys.owner)
    arrival_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One call of the API: its requests to the cluster and the fields that shape its response."""

    response_id: str  # OpenAI's `id`
    arrival: Arrival
    created: int  # Unix time
    model: str
    requests: tuple[Request, ...]  # one per choice; the choices of one prompt stand together
    prompts: tuple[Prompt, ...]
    stop_strings: tuple[str, ...]
    slo: Slo
    service_tier: str
    is_streamed: bool
    has_logprobs: bool
    includes_usage: bool  # streams only
    echoes: bool  # completions only
    has_continuous_usage: bool = False  # every chunk shows the usage so far
    output_format: OutputFormat = field(default_factory=OutputFormat)  # chat completions only
    text_options: TextOptions = field(default_factory=TextOptions)
    has_token_ids: bool = False
    calls_functions: bool = False  # calls are answered as `function_call`, which tool_calls replaced
    num_prompt_logprobs: int | None = None  # shown for each prompt token beside its own; None: none are
    names_tokens_by_id: bool = False  # in log-probabilities
    ignored_fields: tuple[str, ...] = ()  # named in the response's body, where it has no headers (lines of batches)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


class _OutputFields(NamedTuple):
    """Fields that the two endpoints name or default differently."""

    max_tokens: int | None
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    grammar: str  # what the answer must match; empty: anything
    default_max_tokens: int | None = None  # at most the rest of the context; None: all of it


async def build_chat_request(
    chat: ChatCompletionRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None = None
) -> GenerationRequest:
    """Return the requests of a chat completion. `prompts`: None: they are made here. Raises InvalidRequest."""
    (prompt,) = prompts or await chat_prompts(chat, services)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    max_tokens = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    if chat.max_tokens is not None and max_tokens != chat.max_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ.", param="max_tokens")
    num_logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    output_format = chat_output_format(chat, prompt.token_ids, services)
    output = _OutputFields(
        max_tokens, num_logprobs, None, await chat_grammar(chat, output_format, services, arrival.tenant)
    )
    built = _build(chat, (prompt,), arrival, services, output)
    return replace(built, output_format=output_format, calls_functions=bool(chat.functions))


async def build_completion_request(
    completion: CompletionRequest, arrival: Arrival, services: ModelServices, prompts: Prompts | None = None
) -> GenerationRequest:
    """Return the requests of a completion. `prompts`: None: they are made here. Raises InvalidRequest."""
    prompts = prompts or await completion_prompts(completion, services)
    if completion.max_tokens == 0 and not completion.echo and completion.prompt_logprobs is None:
        raise InvalidRequest("max_tokens must be at least 1, or echo must be true.", param="max_tokens")
    num_prompt_logprobs = completion.logprobs if completion.echo else None
    grammar = await answer_grammar(completion, services, arrival.tenant)
    output = _OutputFields(
        completion.max_tokens, completion.logprobs, num_prompt_logprobs, grammar, _DEFAULT_COMPLETION_TOKENS
    )
    return _build(completion, prompts, arrival, services, output)


def _build(
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    arrival: Arrival,
    services: ModelServices,
    output: _OutputFields,
) -> GenerationRequest:
    _check_limits(fields, len(prompts), services.config)
    if fields.truncate_prompt_tokens is not None:
        prompts = [_truncated(prompt, fields.truncate_prompt_tokens, output.max_tokens, services) for prompt in prompts]
    slo = _slo_of(fields, arrival.headers)
    is_chat = isinstance(fields, ChatCompletionRequest)
    return GenerationRequest(
        response_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{arrival.request_id}",
        arrival=arrival,
        created=int(time.time()),
        model=services.model.name,
        requests=_requests(fields, prompts, arrival, services, slo, output),
        prompts=tuple(prompts),
        stop_strings=tuple(fields.stop),
        slo=slo,
        service_tier=SERVICE_TIERS[fields.service_tier].name,
        is_streamed=fields.stream,
        has_logprobs=output.num_logprobs is not None,
        includes_usage=fields.includes_usage,
        has_continuous_usage=fields.has_continuous_usage,
        echoes=isinstance(fields, CompletionRequest) and fields.echo,
        text_options=TextOptions(fields.include_stop_str_in_output, not fields.skip_special_tokens),
        has_token_ids=fields.return_token_ids,
        num_prompt_logprobs=fields.prompt_logprobs,
        names_tokens_by_id=fields.return_tokens_as_token_ids,
    )


def _truncated(prompt: Prompt, num_tokens: int, max_tokens: int | None, services: ModelServices) -> Prompt:
    """Return the last tokens of the prompt: `truncate_prompt_tokens` of them; -1: as many as fit before the answer."""
    if num_tokens == -1:
        num_tokens = max(services.model.max_context_len - (max_tokens or 1), 1)
    if num_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or above 0.", param="truncate_prompt_tokens")
    if len(prompt.token_ids) <= num_tokens:
        return prompt
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


def _slo_of(fields: GenerationFields, headers: Mapping[str, str]) -> Slo:
    slo = parse_slo(headers)
    if fields.service_tier == "flex" and (slo.ttft_s, slo.tpot_s) != (None, None):
        raise InvalidRequest(
            f"{TTFT_HEADER} and {TPOT_HEADER} are not supported with service_tier 'flex'; {DEADLINE_HEADER} is.",
            param="service_tier",
        )
    return slo


def _requests(
    fields: GenerationFields,
    prompts: Sequence[Prompt],
    arrival: Arrival,
    services: ModelServices,
    slo: Slo,
    output: _OutputFields,
) -> tuple[Request, ...]:
    tier = SERVICE_TIERS[fields.service_tier]
    prefix_root = services.prefix_root(arrival.tenant, fields.cache_salt)
    seed = fields.seed if fields.seed is not None else secrets.randbits(63)
    requests: list[Request] = []
    for prompt in prompts:
        sampling = _sampling_params(fields, len(prompt.token_ids), services, output)
        for choice in range(fields.n):
            request = Request(
                request_id=RequestId(f"{arrival.request_id}-{len(requests)}"),
                prompt_token_ids=prompt.token_ids,
                sampling=replace(sampling, seed=_choice_seed(seed, choice)),
                reply_to=services.reply_to,
                arrival_s=arrival.arrival_s,
                request_class=tier.request_class,
                slo=slo,
                priority=fields.priority if fields.priority is not None else tier.priority,
                prefix_root=prefix_root,
                adapter=services.adapter,
            )
            requests.append(request)
    return tuple(requests)


def _sampling_params(
    fields: GenerationFields, prompt_len: int, services: ModelServices, output: _OutputFields
) -> SamplingParams:
    return SamplingParams(
        max_tokens=_max_tokens(fields, prompt_len, services.model.max_context_len, output),
        min_tokens=fields.min_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=max(fields.top_k, 0),
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        ignore_eos=fields.ignore_eos,
        stop_token_ids=check_token_ids(fields.stop_token_ids, services, param="stop_token_ids"),
        logit_bias=_logit_bias(fields, services),
        allowed_token_ids=allowed_token_ids(fields, services),
        bad_words=bad_words(fields.bad_words, services.tokenizer),
        num_logprobs=output.num_logprobs,
        num_prompt_logprobs=_highest(output.num_prompt_logprobs, fields.prompt_logprobs),
        grammar=output.grammar,
    )


def _max_tokens(fields: GenerationFields, prompt_len: int, max_context_len: int, output: _OutputFields) -> int:
    rest = max_context_len - prompt_len
    default = rest if output.default_max_tokens is None else min(rest, output.default_max_tokens)
    max_tokens = default if output.max_tokens is None else output.max_tokens
    if max_tokens > rest or (output.max_tokens is None and rest < 1):
        asked = "at least 1" if output.max_tokens is None else str(output.max_tokens)
        raise ContextTooLong(
            f"This model's maximum context length is {max_context_len} tokens. However, you requested {prompt_len} "
            f"tokens in the prompt and {asked} in the answer. Please shorten one of them.",
            param="messages" if isinstance(fields, ChatCompletionRequest) else "prompt",
        )
    return max_tokens


def _highest(first: int | None, second: int | None) -> int | None:
    return second if first is None else max(first, second or 0)


def _logit_bias(fields: GenerationFields, services: ModelServices) -> tuple[tuple[int, float], ...]:
    if not all(_TOKEN_ID.fullmatch(key) for key in fields.logit_bias):
        raise InvalidRequest("logit_bias must map token ids to numbers.", param="logit_bias")
    token_ids = check_token_ids([int(key) for key in fields.logit_bias], services, param="logit_bias")
    return tuple(zip(token_ids, fields.logit_bias.values(), strict=True))


def _choice_seed(seed: int, choice: int) -> int:
    """Return the client's own seed for the first choice and one derived from it for each other."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
