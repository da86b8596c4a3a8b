"""The language of workloads: one line for any mixture of traffic, typed by a person (docs/workloads.md has examples).

    rt: sharegpt, rate=2, cv=1.5, ttft=0.4, tpot=0.2; be: prompt=uniform(512,1024), output=60, outstanding=64

`;` separates classes of traffic, `,` their settings, and every setting is `key=value` but the name of a source of
lengths (or the path of a file), which may stand alone. Whatever does not belong here is refused by name.
"""

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.random import Generator

from alignedserve.batches.hours import Hours, Schedule, parse_hours, parse_moment
from alignedserve.core.errors import ConfigError, InvalidRequest
from alignedserve.core.request import MAX_PRIORITY, MAX_TENANT_LEN, MAX_WEIGHT, RequestClass
from lab.workload.arrivals import GapDistribution
from lab.workload.distributions import (
    IntArray,
    LengthLimits,
    ValueDistribution,
    parse_distribution,
    parse_number,
    split_outside_parentheses,
    whole,
)
from lab.workload.requests import StartTimes


class PredictionKind(enum.Enum):
    """Quality of a prediction."""

    EXACT = "exact"
    CLASS_MEAN = "mean"  # of the class of traffic
    NOISY = "error"  # the true length times a log-normal error


@dataclass(frozen=True, slots=True)
class PredictionModel:
    """Model that makes predicted lengths from true ones.

    `sigma`: deviation of the error's logarithm; its median is 1.
    """

    kind: PredictionKind
    sigma: float = 0.0

    def predict(self, output_len: IntArray, *, mean_len: float, rng: Generator) -> IntArray:
        if self.kind is PredictionKind.CLASS_MEAN:
            return whole(np.full(len(output_len), mean_len))
        if self.kind is PredictionKind.EXACT:
            return np.maximum(1, output_len)
        return whole(output_len.astype(np.float64) * np.exp(self.sigma * rng.standard_normal(len(output_len))))


def parse_prediction(text: str) -> PredictionModel:
    if text in ("exact", "mean"):
        return PredictionModel(PredictionKind(text))
    if text.startswith("error(") and text.endswith(")"):
        sigma = parse_number("error", text[6:-1])
        if 0 <= sigma <= 5:
            return PredictionModel(PredictionKind.NOISY, sigma)
        raise ConfigError(f"{text!r}: the deviation of the logarithm must lie between 0 and 5")
    raise ConfigError(f"{text!r}: predictions are exact, mean or error(sigma)")


RECORDED = "recorded"
MAX_OUTSTANDING = 10_000
MAX_TURNS = 64
MAX_INSTRUCTIONS = 10_000
MAX_ENCODER_TOKENS = 1_000_000
MAX_SPAN_S = 366 * 86400.0  # from the first request to the last: each second of it is simulated
_NAME = re.compile(r"\s*([A-Za-z][\w-]*)\s*:(.*)", re.DOTALL)
_SOURCE = re.compile(r"[\w-]+|.*[./].*", re.DOTALL)  # a name, or the path of a file
_TOTAL = "all"  # what reports call all classes together


class ClientLimit(enum.Enum):
    """Limits that clients set where the line names no number."""

    CONTEXT = "context"  # none: what the prompt leaves of the context, as a gateway fills it in
    POWER_OF_TWO = "power_of_two"  # the least that holds the answer: tells its length within a factor of two
    EXACT = "exact"  # just the answer's length: tells schedulers what no server knows


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """One class as written. It opens the loop (`rate`, or recorded arrivals) or closes it (`outstanding`, `wave`)."""

    name: str
    source: str | None = None  # of prompt and output lengths
    prompt: ValueDistribution | None = None  # in place of the source's
    output: ValueDistribution | None = None
    turns: int = 1  # of a conversation: `prompt` is then what the user says in one, `rate` that of conversations
    think_s: float = 0.0  # from an answer to the next turn
    instruction: ValueDistribution | None = None  # tokens before everything else
    instructions: int = 1  # different ones, each as likely as the others
    encoder: int = 0  # what an encoder of pictures has to do for each, in prompt tokens
    arrivals: str = GapDistribution.GAMMA.value  # or weibull, recorded, or the name of a rate profile
    rate: float | None = None  # requests per second
    cv: float = 1.0
    start_s: float = 0.0  # of a recording or a profile
    is_repeated: bool = False
    outstanding: int | None = None  # that many in the air, each replaced when it ends
    wave: int | None = None  # that many at once, the next ones when all have ended
    request_class: RequestClass = RequestClass.REAL_TIME
    be_share: float = 0.0  # of its requests, drawn at random, are best-effort
    ttft_s: ValueDistribution | None = None
    tpot_s: ValueDistribution | None = None
    deadline_s: ValueDistribution | None = None
    priority: int = 0
    tenant: str = ""  # the client, among several in one class of requests
    weight: float = 1.0  # of that client's share
    tier: str | None = None
    max_tokens: int | ClientLimit = ClientLimit.CONTEXT
    limits: LengthLimits = field(default_factory=LengthLimits)
    prediction: PredictionModel | None = None
    not_before_s: float = 0.0  # of the run: none of its requests starts before
    hours: Hours | None = None  # in which they start; None: at any hour
    begins: str | None = None  # what clocks show in the zone of these hours when the run begins

    @property
    def starts(self) -> StartTimes | None:
        """Return when its requests start; None: whenever they come."""
        if self.hours is None:
            return StartTimes(Schedule(self.not_before_s)) if self.not_before_s else None
        assert self.begins is not None, "checked by the grammar"
        begins_s = parse_moment(self.begins, self.hours.zone)
        return StartTimes(Schedule(begins_s + self.not_before_s, self.hours), begins_s)

    @property
    def is_closed(self) -> bool:
        """Return whether a request waits for an earlier one to end."""
        return self.outstanding is not None or self.wave is not None


def parse_classes(specification: str) -> tuple[ClassSpec, ...]:
    """Parse all classes. Raises ConfigError that names the class and the setting."""
    parts = [part for part in split_outside_parentheses(specification, ";") if part.strip()]
    if not parts:
        raise ConfigError("the workload is empty (write for example rate=2,prompt=100,output=60)")
    classes = tuple(_parse_class(part, f"class{number}") for number, part in enumerate(parts, start=1))
    names = [spec.name for spec in classes]
    if len(set(names)) < len(names):
        raise ConfigError("workload: two classes have the same name")
    if _TOTAL in names:
        raise ConfigError(f"workload: no class can be called {_TOTAL!r}, which reports call all of them together")
    return classes


def _parse_class(text: str, default_name: str) -> ClassSpec:
    match = _NAME.match(text)
    name, settings_text = (match[1], match[2]) if match else (default_name, text)
    settings: dict[str, object] = {}
    limits: dict[str, int] = {}
    try:
        for setting in split_outside_parentheses(settings_text, ","):
            key, value = _key_and_value(setting)
            if key in settings or key in limits:
                raise ConfigError(f"{key}= stands there twice")
            if key in _LIMITS:
                limits[key] = _whole_number(key, value)
            else:
                settings[key] = _READERS[key](key, value)
        return _checked(name, settings, LengthLimits(**limits))
    except ConfigError as error:
        raise ConfigError(f"workload {name}: {error}") from None


def _key_and_value(setting: str) -> tuple[str, str]:
    key, separator, value = (part.strip() for part in setting.partition("="))
    if not separator:
        key, value = "lengths", key
    if key not in _READERS and key not in _LIMITS:
        raise ConfigError(f"{setting.strip()!r} is not one of {', '.join((*_READERS, *_LIMITS))}")
    return key, value


# --- one setting ------------------------------------------------------------------------------------------------------


def _source(key: str, value: str) -> str:
    if not _SOURCE.fullmatch(value):
        raise ConfigError(f"{value!r} is neither key=value nor the name of lengths or of a file")
    return value


def _law(key: str, value: str) -> ValueDistribution:
    try:
        return parse_distribution(value)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def _positive(key: str, value: str) -> float:
    number = parse_number(key, value)
    if number <= 0:
        raise ConfigError(f"{key} must be above 0")
    return number


def _not_negative(key: str, value: str) -> float:
    number = parse_number(key, value)
    if number < 0:
        raise ConfigError(f"{key} must not be negative")
    return number


def _pause(key: str, value: str) -> float:
    number = _not_negative(key, value)
    if number > MAX_SPAN_S:
        raise ConfigError(f"{key} must be at most {MAX_SPAN_S:g} seconds, a year")
    return number


def _share(key: str, value: str) -> float:
    number = _not_negative(key, value)
    if number > 1:
        raise ConfigError(f"{key} must lie between 0 and 1")
    return number


def _whole_number(key: str, value: str) -> int:
    number = _positive(key, value)
    if number != int(number):
        raise ConfigError(f"{key} must be a whole number")
    return int(number)


def _up_to(limit: int) -> Callable[[str, str], int]:
    def read(key: str, value: str) -> int:
        number = parse_number(key, value)
        if number != int(number) or not 1 <= number <= limit:
            raise ConfigError(f"{key} must be a whole number from 1 to {limit}")
        return int(number)

    return read


def _priority(key: str, value: str) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ConfigError(f"{key}: {value[:80]!r} is not a whole number") from None
    if abs(number) > MAX_PRIORITY:
        raise ConfigError(f"{key} must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return number


def _tenant(key: str, value: str) -> str:
    if not value or len(value) > MAX_TENANT_LEN:
        raise ConfigError(f"{key} must be a name of at most {MAX_TENANT_LEN} characters")
    return value


def _weight(key: str, value: str) -> float:
    number = _positive(key, value)
    if number > MAX_WEIGHT:
        raise ConfigError(f"{key} must be at most {MAX_WEIGHT:g}")
    return number


def _client_limit(key: str, value: str) -> int | ClientLimit:
    names = [limit.value for limit in ClientLimit]
    if value in names:
        return ClientLimit(value)
    try:
        return _whole_number(key, value)
    except ConfigError:
        raise ConfigError(f"{key}: {value!r} is neither a whole number nor one of {', '.join(names)}") from None


def _hours(key: str, value: str) -> Hours:
    try:
        return parse_hours(value.removeprefix("(").removesuffix(")"))
    except InvalidRequest as error:
        raise ConfigError(f"{key}: {error}") from None


def _request_class(key: str, value: str) -> RequestClass:
    try:
        return RequestClass(value)
    except ValueError:
        raise ConfigError(f"{key} must be rt or be") from None


def _yes(key: str, value: str) -> bool:
    if value not in ("yes", "no"):
        raise ConfigError(f"{key} must be yes or no")
    return value == "yes"


_READERS: dict[str, Callable[[str, str], object]] = {
    "lengths": _source,
    "prompt": _law,
    "output": _law,
    "arrivals": _source,
    "rate": _positive,
    "cv": _not_negative,
    "start": _not_negative,
    "repeat": _yes,
    "outstanding": _up_to(MAX_OUTSTANDING),
    "wave": _up_to(MAX_OUTSTANDING),
    "turns": _up_to(MAX_TURNS),
    "think": _pause,
    "instruction": _law,
    "instructions": _up_to(MAX_INSTRUCTIONS),
    "encoder": _up_to(MAX_ENCODER_TOKENS),
    "class": _request_class,
    "be_share": _share,
    "ttft": _law,
    "tpot": _law,
    "deadline": _law,
    "priority": _priority,
    "tenant": _tenant,
    "weight": _weight,
    "tier": _source,
    "max_tokens": _client_limit,
    "predict": lambda key, value: parse_prediction(value),
    "not_before": _pause,
    "hours": _hours,
    "begins": lambda key, value: value,
}
_LIMITS = ("max_prompt", "max_output", "max_total")
_FIELD_OF_KEY = {
    "lengths": "source",
    "start": "start_s",
    "think": "think_s",
    "repeat": "is_repeated",
    "class": "request_class",
    "ttft": "ttft_s",
    "tpot": "tpot_s",
    "deadline": "deadline_s",
    "predict": "prediction",
    "not_before": "not_before_s",
}


# --- one class --------------------------------------------------------------------------------------------------------


def _checked(name: str, settings: dict[str, object], limits: LengthLimits) -> ClassSpec:
    if "class" not in settings and name == RequestClass.BEST_EFFORT.value:
        settings["class"] = RequestClass.BEST_EFFORT
    if "lengths" not in settings:
        for required in ("prompt", "output"):
            if required not in settings:
                raise ConfigError(f"{required}= is missing")
    _check_arrivals(settings)
    _check_hours(settings)
    by_field = {_FIELD_OF_KEY.get(key, key): value for key, value in settings.items()}
    assert by_field.keys() <= {field.name for field in fields(ClassSpec)}, "a key without a field"
    return ClassSpec(name=name, limits=limits, **by_field)  # type: ignore[arg-type]  # read key by key above


def _check_arrivals(settings: dict[str, object]) -> None:
    is_recorded = settings.get("arrivals") == RECORDED
    closed = [key for key in ("outstanding", "wave") if key in settings]
    if len(closed) + (is_recorded or "rate" in settings) != 1:
        raise ConfigError(
            f"give one of rate= or arrivals={RECORDED} (open loop), outstanding= (closed loop) and wave= (all at once)"
        )
    if is_recorded and "lengths" not in settings:
        raise ConfigError(f"arrivals={RECORDED} needs the name of a trace")
    distributions = [distribution.value for distribution in GapDistribution]
    is_steady = settings.get("arrivals", distributions[0]) in distributions
    for key, is_meant in (
        ("cv", not is_recorded and not closed),
        ("arrivals", not closed),
        ("start", not is_steady and not closed),
        ("repeat", is_recorded),
    ):
        if key in settings and not is_meant:
            raise ConfigError(f"{key}= has no meaning beside {closed[0] if closed else 'these arrivals'}")
    if is_recorded and "turns" in settings:
        raise ConfigError("turns= has no meaning beside these arrivals: a recording has every turn's own")
    for key, needed in (("think", "turns"), ("instructions", "instruction")):
        if key in settings and needed not in settings:
            raise ConfigError(f"{key}= has no meaning without {needed}=")
    if "weight" in settings and "tenant" not in settings:
        raise ConfigError("weight= has no meaning without tenant=")
    if settings.get("class") is RequestClass.BEST_EFFORT and settings.get("be_share"):
        raise ConfigError("be_share= has no meaning in a best-effort class")


def _check_hours(settings: dict[str, object]) -> None:
    for key in ("hours", "not_before"):
        if key in settings and settings.get("class") is not RequestClass.BEST_EFFORT:
            raise ConfigError(f"{key}= has no meaning in a real-time class")
    hours, begins = settings.get("hours"), settings.get("begins")
    if (hours is None) != (begins is None):
        raise ConfigError("hours= and begins=, the time when the run begins (2026-11-25T18:00), need each other")
    if isinstance(hours, Hours):
        try:
            parse_moment(str(begins), hours.zone)
        except InvalidRequest as error:
            raise ConfigError(f"begins: {error}") from None
