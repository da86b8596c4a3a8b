"""Builds the requests that the cluster serves from a checked body, for routes and for lines of batches.

One call of the API: its arrival, the terms of its requests, the shape of its response."""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from alignedserve.api.conversation import AnswerSpec, Constraint, Conversation
from alignedserve.api.errors import Forbidden
from alignedserve.api.models.model_services import ChatModel, ModelServices
from alignedserve.api.openai.chat_grammar import answer_grammar, chat_grammar
from alignedserve.api.openai.output_parser import OutputFormat, TextOptions
from alignedserve.api.openai.prompt_encoding import (
    Prompt,
    Prompts,
    chat_output_format,
    check_token_ids,
    encode_chat,
    note_effort,
    param_at,
)
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.work_lanes import rough_length
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ContextTooLong, InvalidRequest
from alignedserve.core.ids import RequestId
from alignedserve.core.keep_alive import parse_keep_alive
from alignedserve.core.picture import whole_runs
from alignedserve.core.request import Request, RequestClass, SamplingParams, Slo
from alignedserve.keys.entry import KeyEntry
from alignedserve.runtime.grammar.compiler import with_free_blanks
from alignedserve.runtime.grammar.trials import ALONE, TrialTurn
from alignedserve.text.tokenizer import Tokenizer

TTFT_HEADER, TPOT_HEADER, DEADLINE_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-deadline-ms"
_MAX_SLO_MS = 3_600_000.0
_MAX_DEADLINE_MS = 7 * 24 * 3_600_000.0
_MILLISECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?", re.ASCII)
_TIER_FIELD, _BACKGROUND_FIELD = b'"service_tier"', b'"background"'
_NAMED_TIER = re.compile(_TIER_FIELD + rb'\s{0,9}:\s{0,9}"([a-z_]{1,20})"')
_IN_BACKGROUND = re.compile(_BACKGROUND_FIELD + rb"\s{0,9}:\s{0,9}true")


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
    key: KeyEntry  # of the client
    ignored: IgnoredFields | None = None  # collects ignored fields; None: unknown fields are refused
    response_id: str | None = None  # of a response that has begun already
    is_line: bool = False  # of a batch: its response has no headers, and its deadline is not the client's own
    arrival_s: float = field(default_factory=time.monotonic)

    @property
    def tenant(self) -> str:
        """The owner of what is stored and cached for it."""
        return self.key.owner


class TermFields(Protocol):
    """Fields of a body that say on which terms its requests are served."""

    @property
    def service_tier(self) -> str:
        """Return the name of the tier."""

    @property
    def priority(self) -> int | None:
        """Return what replaces the tier's priority."""

    @property
    def cache_salt(self) -> str | None:
        """Return what cached prefixes are shared by."""


class CallTerms(NamedTuple):
    """What all requests of one call share."""

    arrival: Arrival
    services: ModelServices
    tier: ServiceTier
    slo: Slo  # that the client named
    priority: int
    prefix_root: bytes
    default: Slo = Slo()  # of those that it did not name

    @classmethod
    def of(cls, fields: TermFields, arrival: Arrival, services: ModelServices) -> "CallTerms":
        """Return the terms of a call. Raises InvalidRequest for objectives that cannot be read or be had, Forbidden."""
        tier, slo = _tier_of(fields.service_tier, arrival), parse_slo(arrival.headers)
        is_real_time = tier.request_class is RequestClass.REAL_TIME
        priority = _priority_of(fields.priority, tier, arrival.key)
        _check_objectives(slo, arrival.key)
        if not is_real_time and (slo.ttft_s, slo.tpot_s) != (None, None):  # by the body's tier, or the key's own
            raise InvalidRequest(
                f"{TTFT_HEADER} and {TPOT_HEADER} are not supported with service_tier 'flex'; {DEADLINE_HEADER} is.",
                param="service_tier",
            )
        default = services.default_slo() if is_real_time and not arrival.is_line else Slo()
        root = services.prefix_root(arrival.tenant, fields.cache_salt)
        return cls(arrival, services, tier, slo, priority, root, default)

    def request(self, index: int, prompt: Prompt, sampling: SamplingParams) -> Request:
        """Return the request of one choice of the call. A body of many prompts is no chat: after as many as a chat may
        have choices they get no default objectives. They go after all that have some, and do not prolong the gaps of
        those that run."""
        is_chat = index < self.services.config.max_choices
        return Request(
            request_id=RequestId(f"{self.arrival.request_id}-{index}"),
            prompt_token_ids=prompt.token_ids,
            second_text_at=prompt.second_text_at,
            pictures=prompt.pictures,
            whole_runs=whole_runs(prompt.pictures),
            num_encoder_tokens=sum(picture.num_encoder_tokens for picture in prompt.pictures),
            sampling=sampling,
            reply_to=self.services.reply_to,
            arrival_s=self.arrival.arrival_s,
            request_class=self.tier.request_class,
            slo=self.slo.completed_by(self.default) if is_chat else self.slo,
            priority=self.priority,
            prefix_root=self.prefix_root,
            adapter=self.services.adapter,
            tenant=self.arrival.key.owner,
            weight=self.arrival.key.weight,
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One call of the API: its requests to the cluster and the fields that shape its response."""

    response_id: str  # OpenAI's `id`
    arrival: Arrival
    model: str
    requests: tuple[Request, ...]  # one per choice; the choices of one prompt stand together
    prompts: tuple[Prompt, ...]
    service_tier: str
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time
    stop_strings: tuple[str, ...] = ()
    is_streamed: bool = False
    has_logprobs: bool = False
    includes_usage: bool = False  # streams only
    has_continuous_usage: bool = False  # every chunk shows the usage so far
    echoes: bool = False  # completions only
    output_format: OutputFormat = field(default_factory=OutputFormat)
    text_options: TextOptions = field(default_factory=TextOptions)
    has_token_ids: bool = False
    calls_functions: bool = False  # calls are answered as `function_call`, which tool_calls replaced
    num_prompt_logprobs: int | None = None  # shown for each prompt token beside its own; None: none are
    names_tokens_by_id: bool = False  # in log-probabilities
    named_slo: Slo = field(default_factory=Slo)  # by the client
    grammar_param: str = ""  # the field that makes the answers' grammar, if they have one

    @property
    def slo(self) -> Slo:
        """Objectives that the response reports on; a line's deadline is ours, not the client's."""
        return Slo() if self.arrival.is_line else self.named_slo

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Ignored fields that the response's body names, where it has no headers."""
        arrival = self.arrival
        return arrival.ignored.names if arrival.is_line and arrival.ignored is not None else ()

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once however many choices it has."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


def class_of(body: object, key: KeyEntry) -> RequestClass:
    """Return the class of the requests that a body will become, whatever its API. Raises Forbidden. A body without a
    tier, such as a count of tokens, has the key's own."""
    if getattr(body, "background", False):
        return RequestClass.BEST_EFFORT
    return _allowed_tier(getattr(body, "service_tier", "auto"), key).request_class


def likely_class(raw: bytes, key: KeyEntry) -> RequestClass:
    """Return the class that a body most likely has, by its bytes alone: for the order of what is done until it is read.
    Who writes such bytes into a text changes only his own place, and only until then."""
    if _first(raw, _BACKGROUND_FIELD, _IN_BACKGROUND) is not None:
        return RequestClass.BEST_EFFORT
    tier = _first(raw, _TIER_FIELD, _NAMED_TIER)
    name = key.tier_of(tier[1].decode() if tier is not None else "auto")
    return SERVICE_TIERS[name].request_class if name is not None else RequestClass.REAL_TIME


def _first(raw: bytes, name: bytes, field: re.Pattern[bytes]) -> re.Match[bytes] | None:
    at = raw.find(name)
    return field.match(raw, at) if at >= 0 else None


def trial_turn(fields: TermFields, arrival: Arrival) -> TrialTurn:
    """Return whose turn the grammar of a call waits for. Raises Forbidden."""
    tier = _tier_of(fields.service_tier, arrival)
    return TrialTurn(arrival.tenant, is_real_time=tier.request_class is RequestClass.REAL_TIME)


def _tier_of(tier: str, arrival: Arrival) -> ServiceTier:
    return SERVICE_TIERS[tier] if arrival.is_line else _allowed_tier(tier, arrival.key)


def _allowed_tier(tier: str, key: KeyEntry) -> ServiceTier:
    name = key.tier_of(tier)
    if name is None:
        allowed = ", ".join(sorted(key.tiers))
        message = f"The key {key.name} may not use service_tier {tier}; it may use: {allowed}."
        raise Forbidden(message, param="service_tier", code="service_tier_not_allowed")
    return SERVICE_TIERS[name]


def _priority_of(priority: int | None, tier: ServiceTier, key: KeyEntry) -> int:
    if priority is None:
        return tier.priority
    check_priority(priority, key)
    return priority


def check_priority(priority: int, key: KeyEntry) -> None:
    """Raise Forbidden for a priority, of a request or of a batch, that the key may not send."""
    if not key.may_have_priority(priority):
        allowed = f"{key.min_priority} to {key.max_priority}"
        message = f"The key {key.name} may not send this priority; it may send {allowed}."
        raise Forbidden(message, param="priority", code="priority_not_allowed")


def _check_objectives(slo: Slo, key: KeyEntry) -> None:
    if key.is_real_time:
        return
    for header, objective_s in ((TTFT_HEADER, slo.ttft_s), (TPOT_HEADER, slo.tpot_s)):
        if objective_s is not None:
            message = f"The key {key.name} is served at best effort alone; {header} is for real-time tiers."
            raise Forbidden(message, param=header, code="objectives_not_allowed")


def parse_slo(headers: Mapping[str, str]) -> Slo:
    """Return the objectives in these headers. Raises InvalidRequest naming the header."""
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


NumberT = TypeVar("NumberT", int, float)
_TOKEN_ID = re.compile(r"\d{1,9}", re.ASCII)


class PreparedChat(NamedTuple):
    """A conversation as the model gets it, and how its answer is decoded and read."""

    prompt: tuple[int, ...]
    output_format: OutputFormat
    grammar: str  # what the answer is decoded under; empty: anything


async def prepare_chat(
    conversation: Conversation,
    constraint: Constraint | None,
    prompt: tuple[int, ...],
    model: ChatModel,
    turn: TrialTurn = ALONE,
    ignored: IgnoredFields | None = None,
) -> PreparedChat:
    """Return an encoded conversation with the form and the grammar of its answer. Raises InvalidRequest.

    `ignored`: gets what tools' schemas say that calls are not held to; None: it is refused."""
    form = chat_output_format(conversation, prompt, model)
    return PreparedChat(prompt, form, await chat_grammar(conversation, constraint, form, model, turn, ignored))


async def build_chat_request(
    conversation: Conversation,
    spec: AnswerSpec,
    arrival: Arrival,
    services: ModelServices,
    prompts: Prompts | None = None,
) -> GenerationRequest:
    """Return the requests of a checked conversation. `prompts`: None: they are made here. Raises InvalidRequest."""
    if prompts is None:
        is_bounded = spec.truncate_prompt_tokens is None
        prompts = (await encode_chat(conversation, services, is_bounded=is_bounded),)
    note_effort(conversation, services, arrival.ignored)
    turn = trial_turn(spec, arrival)
    token_ids, ignored = prompts[0].token_ids, arrival.ignored
    prepared = await prepare_chat(conversation, spec.constraint, token_ids, services, turn, ignored)
    return await _build(spec, prompts, arrival, services, prepared.grammar, prepared.output_format)


async def build_completion_request(
    spec: AnswerSpec, prompts: Prompts, arrival: Arrival, services: ModelServices
) -> GenerationRequest:
    """Return the requests of a completion. Raises InvalidRequest."""
    grammar = await answer_grammar(spec.constraint, services, trial_turn(spec, arrival))
    return await _build(spec, prompts, arrival, services, grammar, OutputFormat(is_continued=True))


async def _build(
    spec: AnswerSpec,
    prompts: Sequence[Prompt],
    arrival: Arrival,
    services: ModelServices,
    grammar: str,
    output_format: OutputFormat,
) -> GenerationRequest:
    _check_limits(spec, len(prompts), services.config)
    if spec.truncate_prompt_tokens is not None:
        prompts = [_truncated(prompt, spec.truncate_prompt_tokens, spec.max_tokens, services) for prompt in prompts]
    terms = CallTerms.of(spec, arrival, services)
    services.uses.keep_alive_s = _keep_alive_s(spec)
    return GenerationRequest(
        response_id=spec.response_id or spec.id_prefix + arrival.request_id,
        arrival=arrival,
        model=services.model.name,
        requests=await _requests(spec, prompts, services, terms, grammar),
        prompts=tuple(prompts),
        stop_strings=tuple(spec.stop),
        service_tier=terms.tier.name,
        is_streamed=spec.stream,
        has_logprobs=spec.num_logprobs is not None,
        includes_usage=spec.includes_usage,
        has_continuous_usage=spec.has_continuous_usage,
        echoes=spec.echo,
        output_format=output_format,
        text_options=TextOptions(spec.include_stop_str_in_output, not spec.skip_special_tokens, spec.return_token_ids),
        has_token_ids=spec.return_token_ids,
        calls_functions=spec.calls_functions,
        num_prompt_logprobs=spec.prompt_logprobs,
        names_tokens_by_id=spec.return_tokens_as_token_ids,
        named_slo=terms.slo,
        grammar_param=spec.constraint.param if spec.constraint is not None else "tools",
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


def _check_limits(spec: AnswerSpec, num_prompts: int, config: GatewayConfig) -> None:
    if spec.n > config.max_choices:
        raise InvalidRequest(f"n must be at most {config.max_choices}.", param="n")
    if len(spec.stop) > config.max_stop_strings:
        message = f"{spec.stop_param} must hold at most {config.max_stop_strings} strings."
        raise InvalidRequest(message, param=spec.stop_param)
    if spec.n * num_prompts > config.max_concurrent_requests:
        raise InvalidRequest(f"More than {config.max_concurrent_requests} choices in one request.", param="prompt")


async def _requests(
    spec: AnswerSpec, prompts: Sequence[Prompt], services: ModelServices, terms: CallTerms, grammar: str
) -> tuple[Request, ...]:
    seed = spec.seed if spec.seed is not None else secrets.randbits(63)
    max_context_len = services.model.max_context_len
    limits = []
    for index, prompt in enumerate(prompts):
        param = param_at(spec.prompt_param, index, of=len(prompts))
        limits.append(_max_tokens(len(prompt.token_ids), max_context_len, spec, param=param))
    # What lists name is read once for all prompts: of 256 bad words alone that takes milliseconds.
    length = rough_length([spec.bad_words, spec.allowed_token_ids, spec.logit_bias])
    shared = await services.lanes.run(length, partial(_sampling_params, spec, limits[0], services, grammar))
    requests: list[Request] = []
    for prompt, max_tokens in zip(prompts, limits, strict=True):
        for choice in range(spec.n):
            sampling = replace(shared, max_tokens=max_tokens, seed=choice_seed(seed, choice))
            requests.append(terms.request(len(requests), prompt, sampling))
        if len(requests) < len(prompts) * spec.n:
            await asyncio.sleep(0)  # streams continue between prompts
    return tuple(requests)


def _sampling_params(spec: AnswerSpec, max_tokens: int, services: ModelServices, grammar: str) -> SamplingParams:
    defaults = services.model.sampling
    echoed_logprobs = spec.num_logprobs if spec.echo else None
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=spec.min_tokens,
        temperature=_or_default(spec.temperature, defaults.temperature),
        top_p=_or_default(spec.top_p, defaults.top_p),
        top_k=max(_or_default(spec.top_k, defaults.top_k), 0),
        min_p=_or_default(spec.min_p, defaults.min_p),
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=_or_default(spec.repetition_penalty, defaults.repetition_penalty),
        ignore_eos=spec.ignore_eos,
        stop_token_ids=check_token_ids(spec.stop_token_ids, services, param="stop_token_ids"),
        logit_bias=_logit_bias(spec, services),
        allowed_token_ids=allowed_token_ids(spec, services),
        bad_words=bad_words(spec.bad_words, services.tokenizer),
        num_logprobs=spec.num_logprobs,
        num_prompt_logprobs=_highest(echoed_logprobs, spec.prompt_logprobs),
        grammar=with_free_blanks(grammar) if spec.has_free_blanks else grammar,
    )


def _keep_alive_s(spec: AnswerSpec) -> float | None:
    try:
        return None if spec.keep_alive is None else parse_keep_alive(spec.keep_alive)
    except ValueError as error:
        raise InvalidRequest(f"keep_alive {error}.", param="keep_alive") from error


def _or_default(value: NumberT | None, default: NumberT) -> NumberT:
    return default if value is None else value


def _max_tokens(prompt_len: int, max_context_len: int, spec: AnswerSpec, *, param: str) -> int:
    rest = max_context_len - prompt_len
    fitting = rest if spec.max_fitting_tokens is None else min(rest, spec.max_fitting_tokens)
    max_tokens = fitting if spec.max_tokens is None else spec.max_tokens
    if max_tokens > rest or (spec.max_tokens is None and rest < 1):
        answer_len = "at least 1" if spec.max_tokens is None else str(spec.max_tokens)
        where = "the prompt" if param == spec.prompt_param else param
        raise ContextTooLong(
            f"This model's maximum context length is {max_context_len} tokens. However, you requested {prompt_len} "
            f"tokens in {where} and {answer_len} in the answer. Please shorten one of them.",
            param=param,
        )
    return max_tokens


def _highest(first: int | None, second: int | None) -> int | None:
    return second if first is None else max(first, second or 0)


def _logit_bias(spec: AnswerSpec, services: ModelServices) -> tuple[tuple[int, float], ...]:
    if not all(_TOKEN_ID.fullmatch(key) for key in spec.logit_bias):
        raise InvalidRequest("logit_bias must map token ids to numbers.", param="logit_bias")
    token_ids = check_token_ids([int(key) for key in spec.logit_bias], services, param="logit_bias")
    return tuple(zip(token_ids, spec.logit_bias.values(), strict=True))


def choice_seed(seed: int, choice: int) -> int:
    """Return the client's own seed for the first choice and one derived from it for each other."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def allowed_token_ids(spec: AnswerSpec, services: ModelServices) -> tuple[int, ...]:
    """Return the tokens that may be chosen, each once; empty: all. Raises InvalidRequest."""
    param = "allowed_token_ids"
    allowed = check_token_ids(list(dict.fromkeys(spec.allowed_token_ids)), services, param=param)
    if not spec.min_tokens or not allowed:
        return allowed
    stops = {*spec.stop_token_ids, *(() if spec.ignore_eos else services.model.eos_token_ids)}
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
