"""From a checked schema to the requests that the cluster serves."""

import hashlib
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, SamplingParams, Slo
from alignedserve.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from alignedserve.gateway.services import Services

TTFT_HEADER, TPOT_HEADER, DEADLINE_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-deadline-ms"
_MAX_SLO_MS = 3_600_000.0
_MAX_DEADLINE_MS = 7 * 24 * 3_600_000.0
_MILLISECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)
_TOKEN_ID = re.compile(r"\d{1,9}", re.ASCII)
_DEFAULT_COMPLETION_TOKENS = 16


class Tier(NamedTuple):
    """What a `service_tier` means here."""

    name: str  # as the answer names it
    request_class: RequestClass
    priority: int


TIERS = {
    "auto": Tier("default", RequestClass.REAL_TIME, 0),
    "default": Tier("default", RequestClass.REAL_TIME, 0),
    "priority": Tier("priority", RequestClass.REAL_TIME, -1),
    "fast": Tier("priority", RequestClass.REAL_TIME, -1),
    "flex": Tier("flex", RequestClass.BEST_EFFORT, 0),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in both forms."""

    token_ids: tuple[int, ...]
    text: str = ""  # what `echo` repeats


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one HTTP request asks of the cluster. Choices of one prompt stand together."""

    requests: tuple[Request, ...]
    prompts: tuple[Prompt, ...]
    stops: tuple[str, ...]
    slo: Slo
    tier: str

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Who asks, and when."""

    request_id: str
    arrival_s: float
    headers: Mapping[str, str]


def plan_chat(chat: ChatCompletionRequest, prompt: Prompt, arrival: Arrival, services: Services) -> Plan:
    """Requests of a chat completion. Raises InvalidRequest."""
    if chat.top_logprobs is not None and not chat.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    asked = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    if chat.max_tokens is not None and asked != chat.max_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ.", param="max_tokens")
    num_logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    return _plan(chat, (prompt,), arrival, services, _Wanted(asked, num_logprobs, None))


def plan_completion(
    completion: CompletionRequest, prompts: Sequence[Prompt], arrival: Arrival, services: Services
) -> Plan:
    """Requests of a completion. Raises InvalidRequest."""
    if completion.max_tokens == 0 and not completion.echo:
        raise InvalidRequest("max_tokens must be at least 1, or echo must be true.", param="max_tokens")
    num_prompt_logprobs = completion.logprobs if completion.echo else None
    wanted = _Wanted(completion.max_tokens, completion.logprobs, num_prompt_logprobs, _DEFAULT_COMPLETION_TOKENS)
    return _plan(completion, prompts, arrival, services, wanted)


class _Wanted(NamedTuple):
    max_tokens: int | None
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    default_max_tokens: int | None = None  # at most the rest of the context; None: all of it


def _plan(
    fields: GenerationFields, prompts: Sequence[Prompt], arrival: Arrival, services: Services, wanted: _Wanted
) -> Plan:
    config = services.config
    if fields.n > config.max_choices:
        raise InvalidRequest(f"n must be at most {config.max_choices}.", param="n")
    if len(fields.stop) > config.max_stop_strings:
        raise InvalidRequest(f"stop must hold at most {config.max_stop_strings} strings.", param="stop")
    if fields.n * len(prompts) > config.max_concurrent_requests:
        raise InvalidRequest(f"More than {config.max_concurrent_requests} choices in one request.", param="prompt")
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")
    slo = _slo_of(arrival.headers)
    if fields.service_tier == "flex" and (slo.ttft_s, slo.tpot_s) != (None, None):
        raise InvalidRequest(
            f"{TTFT_HEADER} and {TPOT_HEADER} are not supported with service_tier 'flex'; {DEADLINE_HEADER} is.",
            param="service_tier",
        )
    seed = fields.seed if fields.seed is not None else secrets.randbits(63)
    requests: list[Request] = []
    for prompt in prompts:
        sampling = _sampling_of(fields, len(prompt.token_ids), services, wanted)
        for choice in range(fields.n):
            request_id = RequestId(f"{arrival.request_id}-{len(requests)}")
            one = replace(sampling, seed=_choice_seed(seed, choice))
            requests.append(_request(request_id, prompt, one, arrival, fields, slo, services.reply_to))
    return Plan(tuple(requests), tuple(prompts), tuple(fields.stop), slo, TIERS[fields.service_tier].name)


def _request(
    request_id: RequestId,
    prompt: Prompt,
    sampling: SamplingParams,
    arrival: Arrival,
    fields: GenerationFields,
    slo: Slo,
    reply_to: str,
) -> Request:
    tier = TIERS[fields.service_tier]
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        sampling=sampling,
        reply_to=reply_to,
        arrival_s=arrival.arrival_s,
        request_class=tier.request_class,
        slo=slo,
        priority=fields.priority if fields.priority is not None else tier.priority,
    )


def _sampling_of(fields: GenerationFields, prompt_len: int, services: Services, wanted: _Wanted) -> SamplingParams:
    limit = services.model.max_context_len
    rest = limit - prompt_len
    default = rest if wanted.default_max_tokens is None else min(rest, wanted.default_max_tokens)
    max_tokens = default if wanted.max_tokens is None else wanted.max_tokens
    if max_tokens > rest or (wanted.max_tokens is None and rest < 1):
        asked = "at least 1" if wanted.max_tokens is None else str(wanted.max_tokens)
        raise ContextTooLong(
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt_len} tokens in "
            f"the prompt and {asked} in the answer. Please shorten one of them.",
            param="messages" if isinstance(fields, ChatCompletionRequest) else "prompt",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        ignore_eos=fields.ignore_eos,
        stop_token_ids=known_token_ids(fields.stop_token_ids, services, param="stop_token_ids"),
        logit_bias=_logit_bias_of(fields, services),
        num_logprobs=wanted.num_logprobs,
        num_prompt_logprobs=wanted.num_prompt_logprobs,
        seed=fields.seed or 0,
    )


def known_token_ids(token_ids: Sequence[int], services: Services, *, param: str = "prompt") -> tuple[int, ...]:
    """These ids, if the vocabulary has all of them. Raises InvalidRequest."""
    known_ids = range(services.tokenizer.vocab_size)
    if any(token_id not in known_ids for token_id in token_ids):
        raise InvalidRequest(f"{param} holds an id outside the vocabulary (0 to {len(known_ids) - 1}).", param=param)
    return tuple(token_ids)


def _logit_bias_of(fields: GenerationFields, services: Services) -> tuple[tuple[int, float], ...]:
    if not all(_TOKEN_ID.fullmatch(key) for key in fields.logit_bias):
        raise InvalidRequest("logit_bias must map token ids to numbers.", param="logit_bias")
    token_ids = known_token_ids([int(key) for key in fields.logit_bias], services, param="logit_bias")
    return tuple(zip(token_ids, fields.logit_bias.values(), strict=True))


def _choice_seed(seed: int, choice: int) -> int:
    """The first choice has the client's own seed; the others derive theirs from it."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _slo_of(headers: Mapping[str, str]) -> Slo:
    return Slo(
        ttft_s=_seconds(headers, TTFT_HEADER),
        tpot_s=_seconds(headers, TPOT_HEADER),
        deadline_s=_seconds(headers, DEADLINE_HEADER, _MAX_DEADLINE_MS),
    )


def _seconds(headers: Mapping[str, str], name: str, at_most_ms: float = _MAX_SLO_MS) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    value_ms = float(text) if _MILLISECONDS.fullmatch(text) else 0.0
    if not 0.0 < value_ms <= at_most_ms:
        raise InvalidRequest(f"{name} must be milliseconds above 0 and at most {at_most_ms:.0f}.", param=name)
    return value_ms / 1000.0


def new_arrival(request_id: str, headers: Mapping[str, str]) -> Arrival:
    """Stamp a request on its way in."""
    return Arrival(request_id, time.monotonic(), headers)
