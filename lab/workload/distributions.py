"""Distributions as a person writes them: `60`, `uniform(32,128)`, `lognormal(100,300)`, `mix(0.9: ..., 0.1: ...)`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from alignedserve.core.errors import ConfigError

FloatArray = NDArray[np.float64]
_Z_95 = 1.6448536269514722  # the 95th percentile of the standard normal distribution


@dataclass(frozen=True, slots=True)
class ValueDistribution:
    """A distribution of lengths in tokens or of objectives in seconds; `parse_distribution` makes one."""

    kind: str
    arguments: tuple[float, ...]
    parts: tuple["ValueDistribution", ...] = ()  # of a mix, whose arguments are the weights

    @property
    def constant(self) -> float | None:
        """Return the only number that can be drawn; None: several can."""
        return self.arguments[0] if self.kind == "constant" else None

    def draw(self, rng: Generator, count: int) -> FloatArray:
        """Draw `count` numbers; the caller rounds and clamps."""
        if self.parts:
            return self._draw_mix(rng, count)
        return _KINDS[self.kind].draw(rng, count, self.arguments)

    def _draw_mix(self, rng: Generator, count: int) -> FloatArray:
        weights = np.array(self.arguments)
        chosen = rng.choice(len(self.parts), size=count, p=weights / weights.sum())
        drawn = np.stack([part.draw(rng, count) for part in self.parts])
        return np.asarray(drawn[chosen, np.arange(count)])


def _uniform(rng: Generator, count: int, arguments: tuple[float, ...]) -> FloatArray:
    return rng.uniform(arguments[0], arguments[1], count)


def _lognormal(rng: Generator, count: int, arguments: tuple[float, ...]) -> FloatArray:
    median, p95 = arguments
    return median * np.exp(rng.standard_normal(count) * (math.log(p95 / median) / _Z_95))


def _skewed(rng: Generator, count: int, arguments: tuple[float, ...]) -> FloatArray:
    mean, deviation = arguments
    variance = math.log1p((deviation / mean) ** 2)
    return mean * np.exp(rng.standard_normal(count) * math.sqrt(variance) - variance / 2)


@dataclass(frozen=True, slots=True)
class _Kind:
    num_arguments: int | None  # None: one or more
    draw: Callable[[Generator, int, tuple[float, ...]], FloatArray]
    is_range: bool = False  # the first argument must not exceed the second


_KINDS = {
    "constant": _Kind(1, lambda rng, count, arguments: np.full(count, arguments[0])),
    "uniform": _Kind(2, _uniform, is_range=True),
    "exponential": _Kind(1, lambda rng, count, arguments: rng.exponential(arguments[0], count)),
    "lognormal": _Kind(2, _lognormal, is_range=True),
    "skewed": _Kind(2, _skewed),
    "choice": _Kind(None, lambda rng, count, arguments: rng.choice(np.array(arguments), count)),
}
_NAMES = (*(name for name in _KINDS if name != "constant"), "mix")


def constant(number: float) -> ValueDistribution:
    return ValueDistribution("constant", (number,))


# --- reading ----------------------------------------------------------------------------------------------------------


def parse_distribution(text: str) -> ValueDistribution:
    """Parse a number, or a distribution with its arguments in parentheses. Raises ConfigError.

    `uniform(low,high)`, `exponential(mean)`, `choice(a,b,...)`, `lognormal(median,p95)`, `skewed(mean,deviation)` (the
    log-normal with these two moments), `mix(weight: distribution, weight: distribution, ...)`.
    """
    text = text.strip()
    name, parenthesis, rest = text.partition("(")
    if not parenthesis:
        return _sensible(text, constant(_finite(text)))
    name = name.strip()
    if name not in _NAMES or not rest.endswith(")"):
        raise ConfigError(f"{text!r}: the distributions are {', '.join(_NAMES)}, each with (...) after it")
    arguments = split_outside_parentheses(rest[:-1], ",")
    if name == "mix":
        return _parse_mix(text, arguments)
    numbers = tuple(parse_number(name, argument) for argument in arguments)
    if _KINDS[name].num_arguments not in (None, len(numbers)):
        raise ConfigError(f"{text!r}: {name} takes {_KINDS[name].num_arguments} numbers")
    return _sensible(text, ValueDistribution(name, numbers))


def _parse_mix(text: str, arguments: list[str]) -> ValueDistribution:
    weights, parts = [], []
    for argument in arguments:
        weight, colon, distribution = argument.partition(":")
        if not colon:
            raise ConfigError(f"{text!r}: a mix is written mix(weight: distribution, weight: distribution, ...)")
        weights.append(parse_number("weight", weight))
        parts.append(parse_distribution(distribution))
    if min(weights) <= 0:
        raise ConfigError(f"{text!r}: weights must be above 0")
    return ValueDistribution("mix", tuple(weights), tuple(parts))


def _sensible(text: str, distribution: ValueDistribution) -> ValueDistribution:
    if min(distribution.arguments) <= 0:
        raise ConfigError(f"{text!r}: numbers must be above 0")
    if _KINDS[distribution.kind].is_range and distribution.arguments[0] > distribution.arguments[1]:
        raise ConfigError(f"{text!r}: the first number must not exceed the second")
    return distribution


def parse_number(name: str, text: str) -> float:
    """Parse a finite number. Raises ConfigError that begins with `name`."""
    try:
        return _finite(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{text.strip()!r} is not a number") from None
    if not math.isfinite(number):
        raise ConfigError(f"{text.strip()!r} is not finite")
    return number


def split_outside_parentheses(text: str, separator: str) -> list[str]:
    """Split the text at separators outside parentheses."""
    pieces, depth, begin = [], 0, 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == separator and depth == 0:
            pieces.append(text[begin:position])
            begin = position + 1
    return [*pieces, text[begin:]]


IntArray = NDArray[np.int64]
TermsArray = NDArray[np.object_]  # of Terms (traces.py), or None where a row states none
_MAX_ROUNDS = 200  # of drawing again what a limit dropped


@dataclass(frozen=True, slots=True, eq=False)
class TokenLengths:
    """Tokens of requests, row by row, and the terms that a trace states for them.

    None where a recording lacks the column.
    """

    prompt_len: IntArray | None
    output_len: IntArray | None
    terms: TermsArray | None = None

    def __len__(self) -> int:
        column = self.prompt_len if self.prompt_len is not None else self.output_len
        assert column is not None, "lengths without any column"
        return len(column)

    def take(self, rows: IntArray) -> "TokenLengths":
        return TokenLengths(
            prompt_len=None if self.prompt_len is None else self.prompt_len[rows],
            output_len=None if self.output_len is None else self.output_len[rows],
            terms=None if self.terms is None else self.terms[rows],
        )

    def draw(self, rng: Generator, count: int) -> "TokenLengths":
        return self.take(rng.integers(len(self), size=count))


def joined(pieces: Sequence[TokenLengths]) -> TokenLengths:
    """Concatenate the rows; a column that one of the parts lacks is left out."""

    def column(columns: list[NDArray[Any] | None]) -> NDArray[Any] | None:
        present = [column for column in columns if column is not None]
        return np.concatenate(present) if len(present) == len(columns) else None

    return TokenLengths(
        column([piece.prompt_len for piece in pieces]),
        column([piece.output_len for piece in pieces]),
        column([piece.terms for piece in pieces]),
    )


class LengthSource(Protocol):
    """Source that lengths of requests are drawn from."""

    def draw(self, rng: Generator, count: int) -> TokenLengths:
        """Draw `count` rows. The same generator gives the same rows."""


def whole(drawn: FloatArray) -> IntArray:
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """TokenLengths of a recording, with distributions for the columns that it lacks or that were given explicitly."""

    source: LengthSource | None
    prompt: ValueDistribution | None = None
    output: ValueDistribution | None = None

    def draw(self, rng: Generator, count: int) -> TokenLengths:
        """Draw `count` rows. Raises ConfigError where a column is missing."""
        lengths = TokenLengths(None, None) if self.source is None else self.source.draw(rng, count)
        return self.completed(lengths, rng, count)

    def completed(self, found: TokenLengths, rng: Generator, count: int) -> TokenLengths:
        prompt_len = found.prompt_len if self.prompt is None else whole(self.prompt.draw(rng, count))
        output_len = found.output_len if self.output is None else whole(self.output.draw(rng, count))
        for name, column in (("prompt", prompt_len), ("output", output_len)):
            if column is None:
                raise ConfigError(f"{name}= is missing: nothing says how long a {name} is")
        return TokenLengths(prompt_len, output_len, found.terms)


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Scales first, then clamps, then drops what is still longer than `max_total` (prompt and output together)."""

    prompt_scale: float = 1.0
    output_scale: float = 1.0
    max_prompt: int | None = None
    max_output: int | None = None
    max_total: int | None = None

    def prompt_lens(self, lengths: IntArray) -> IntArray:
        """Return the lengths to send for traced or drawn prompt lengths."""
        return _limited(lengths, self.prompt_scale, self.max_prompt)

    def output_lens(self, lengths: IntArray) -> IntArray:
        """Return the lengths to ask for."""
        return _limited(lengths, self.output_scale, self.max_output)

    def cut(self, lengths: TokenLengths) -> tuple[TokenLengths, IntArray]:
        """Return the rows that are left, and their numbers."""
        assert lengths.prompt_len is not None, "limits come after the columns are complete"
        assert lengths.output_len is not None, "limits come after the columns are complete"
        prompt_len, output_len = self.prompt_lens(lengths.prompt_len), self.output_lens(lengths.output_len)
        kept = np.arange(len(prompt_len))
        if self.max_total is not None:
            kept = np.flatnonzero(prompt_len + output_len <= self.max_total)
        return replace(lengths, prompt_len=prompt_len, output_len=output_len).take(kept), kept

    def draw(self, source: LengthSource, rng: Generator, count: int) -> TokenLengths:
        """Draw `count` rows within the limits; dropped ones are drawn again. Raises ConfigError if hardly any fits."""
        pieces: list[TokenLengths] = []
        num_kept = 0
        for _ in range(_MAX_ROUNDS):
            kept, _numbers = self.cut(source.draw(rng, max(64, count - num_kept)))
            pieces.append(kept)
            num_kept += len(kept)
            if num_kept >= count:
                return joined(pieces).take(np.arange(count))
        raise ConfigError(f"max_total={self.max_total}: hardly any request is that short")


def _limited(lengths: IntArray, scale: float, limit: int | None) -> IntArray:
    return np.asarray(np.clip(np.rint(lengths * scale), 1, limit), dtype=np.int64)
