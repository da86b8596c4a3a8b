"""Parser of `--synthetic` (the grammar stands in workload.py)."""

import math
import random
import re
from dataclasses import dataclass, fields

from alignedserve.core.errors import ConfigError

_Z_95 = 1.6448536269514722  # the 95th percentile of the standard normal distribution
_CLASS = re.compile(r"^\s*(?:([A-Za-z][\w-]*)\s*:)?(.*)$", re.DOTALL)
_DISTRIBUTION = re.compile(r"^([a-z]+)\(([^()]*)\)$")
_COMMA_OUTSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")
_NUM_ARGUMENTS = {"uniform": 2, "exponential": 1, "lognormal": 2, "choice": None}  # None: one or more
MAX_OUTSTANDING = 10_000


@dataclass(frozen=True, slots=True)
class Length:
    """A distribution of lengths in tokens."""

    kind: str  # constant, uniform, exponential, lognormal, choice
    arguments: tuple[float, ...]

    def draw(self, rng: random.Random) -> float:
        """One length; the caller rounds and clamps."""
        first, last = self.arguments[0], self.arguments[-1]
        match self.kind:
            case "uniform":
                return rng.uniform(first, last)
            case "exponential":
                return rng.expovariate(1.0 / first)
            case "lognormal":
                return first * math.exp(rng.gauss(0.0, 1.0) * math.log(last / first) / _Z_95)
            case "choice":
                return rng.choice(self.arguments)
            case _:
                return first


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """One class as written; exactly one of `rate` and `outstanding` is set."""

    name: str
    prompt: Length
    output: Length
    rate: float | None = None
    cv: float = 1.0
    outstanding: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    tier: str | None = None


_FIELD_OF_KEY = {"ttft": "ttft_s", "tpot": "tpot_s", "deadline": "deadline_s"} | {
    name: name for name in ("rate", "cv", "outstanding", "prompt", "output", "tier")
}


def parse_classes(specification: str) -> tuple[ClassSpec, ...]:
    """All classes. Raises ConfigError saying which setting is wrong."""
    parts = [part for part in specification.split(";") if part.strip()]
    if not parts:
        raise ConfigError("--synthetic is empty (write for example rate=2,prompt=100,output=60)")
    classes = tuple(_parse_class(part, f"class{number}") for number, part in enumerate(parts, start=1))
    if len({spec.name for spec in classes}) < len(classes):
        raise ConfigError("--synthetic: two classes have the same name")
    return classes


def _parse_class(text: str, default_name: str) -> ClassSpec:
    match = _CLASS.match(text)
    assert match is not None, "the pattern matches every text"
    name = match[1] or default_name
    settings: dict[str, object] = {}
    for setting in _COMMA_OUTSIDE_PARENTHESES.split(match[2]):
        key, separator, value = (part.strip() for part in setting.partition("="))
        if not separator or key not in _FIELD_OF_KEY:
            raise ConfigError(f"--synthetic {name}: {setting.strip()!r} is not one of {', '.join(_FIELD_OF_KEY)}")
        settings[_FIELD_OF_KEY[key]] = _parse_value(name, key, value)
    return _checked(name, settings)


def _parse_value(name: str, key: str, value: str) -> object:
    if key in ("prompt", "output"):
        return parse_length(value)
    if key == "tier":
        return value
    number = _number(f"{name}.{key}", value)
    if key == "outstanding":
        if number != int(number) or not 1 <= number <= MAX_OUTSTANDING:
            raise ConfigError(f"--synthetic {name}.outstanding must be a whole number from 1 to {MAX_OUTSTANDING}")
        return int(number)
    if number < 0 or (number == 0 and key != "cv"):
        raise ConfigError(f"--synthetic {name}.{key} must be above 0")
    return number


def _checked(name: str, settings: dict[str, object]) -> ClassSpec:
    for required in ("prompt", "output"):
        if required not in settings:
            raise ConfigError(f"--synthetic {name}: {required}= is missing")
    if ("rate" in settings) == ("outstanding" in settings):
        raise ConfigError(f"--synthetic {name}: give either rate= (open loop) or outstanding= (closed loop)")
    assert settings.keys() <= {field.name for field in fields(ClassSpec)}, "a key without a field"
    return ClassSpec(name=name, **settings)  # type: ignore[arg-type]  # checked key by key above


def parse_length(text: str) -> Length:
    """A number or a distribution. Raises ConfigError."""
    match = _DISTRIBUTION.match(text)
    if match is None:
        return _sensible(text, Length("constant", (_number("length", text),)))
    kind = match[1]
    if kind not in _NUM_ARGUMENTS:
        raise ConfigError(f"{text!r}: the distributions are {', '.join(_NUM_ARGUMENTS)}")
    arguments = tuple(_number(kind, part) for part in match[2].split(","))
    if _NUM_ARGUMENTS[kind] not in (None, len(arguments)):
        raise ConfigError(f"{text!r}: {kind} takes {_NUM_ARGUMENTS[kind]} numbers")
    return _sensible(text, Length(kind, arguments))


def _sensible(text: str, length: Length) -> Length:
    if min(length.arguments) <= 0:
        raise ConfigError(f"{text!r}: lengths must be above 0")
    if length.kind in ("uniform", "lognormal") and length.arguments[0] > length.arguments[1]:
        raise ConfigError(f"{text!r}: the first number must not exceed the second")
    return length


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{name}: {text.strip()!r} is not a number") from None
    if not math.isfinite(number):
        raise ConfigError(f"{name}: {text.strip()!r} is not finite")
    return number
