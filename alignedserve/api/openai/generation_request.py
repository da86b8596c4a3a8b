"""One call of the API: its arrival, the terms of its requests, the shape of its response."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from alignedserve.api.errors import Forbidden
from alignedserve.api.models.model_services import ModelServices
from alignedserve.api.openai.output_parser import OutputFormat, TextOptions
from alignedserve.api.openai.prompt_encoding import Prompt
from alignedserve.api.schema import IgnoredFields
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.ids import RequestId
from alignedserve.core.picture import whole_runs
from alignedserve.core.request import Request, RequestClass, SamplingParams, Slo
from alignedserve.keys.entry import KeyEntry
from alignedserve.runtime.grammar.trials import TrialTurn

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
        """Return the request of one choice of the call.

        A body of many prompts is no chat: after as many as a chat may have choices they get no default objectives. They
        go after all that have some, and do not prolong the gaps of those that run.
        """
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
    """Return the class of the requests that a body will become, whatever its API. Raises Forbidden.

    A body without a tier, such as a count of tokens, has the key's own.
    """
    if getattr(body, "background", False):
        return RequestClass.BEST_EFFORT
    return _allowed_tier(getattr(body, "service_tier", "auto"), key).request_class


def likely_class(raw: bytes, key: KeyEntry) -> RequestClass:
    """Return the class that a body most likely has, by its bytes alone: for the order of what is done until it is read.

    Who writes such bytes into a text changes only his own place, and only until then.
    """
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
