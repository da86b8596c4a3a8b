"""Lengths of prompts and answers: columns, where they are drawn from, and how they are cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from alignedserve.core.errors import ConfigError
from lab.workload.distributions import FloatArray, ValueDistribution

IntArray = NDArray[np.int64]
TermsArray = NDArray[np.object_]  # of Terms (traces.py), or None where a row states none
_MAX_ROUNDS = 200  # of drawing again what a limit dropped


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
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

    def take(self, rows: IntArray) -> "Lengths":
        return Lengths(
            prompt_len=None if self.prompt_len is None else self.prompt_len[rows],
            output_len=None if self.output_len is None else self.output_len[rows],
            terms=None if self.terms is None else self.terms[rows],
        )

    def draw(self, rng: Generator, count: int) -> "Lengths":
        return self.take(rng.integers(len(self), size=count))


def joined(pieces: Sequence[Lengths]) -> Lengths:
    """Concatenate the rows; a column that one of the parts lacks is left out."""

    def column(columns: list[NDArray[Any] | None]) -> NDArray[Any] | None:
        present = [column for column in columns if column is not None]
        return np.concatenate(present) if len(present) == len(columns) else None

    return Lengths(
        column([piece.prompt_len for piece in pieces]),
        column([piece.output_len for piece in pieces]),
        column([piece.terms for piece in pieces]),
    )


class LengthSource(Protocol):
    """Source that lengths of requests are drawn from."""

    def draw(self, rng: Generator, count: int) -> Lengths:
        """Draw `count` rows. The same generator gives the same rows."""


def whole(drawn: FloatArray) -> IntArray:
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """Lengths of a recording, with distributions for the columns that it lacks or that were given explicitly."""

    source: LengthSource | None
    prompt: ValueDistribution | None = None
    output: ValueDistribution | None = None

    def draw(self, rng: Generator, count: int) -> Lengths:
        """Draw `count` rows. Raises ConfigError where a column is missing."""
        lengths = Lengths(None, None) if self.source is None else self.source.draw(rng, count)
        return self.completed(lengths, rng, count)

    def completed(self, found: Lengths, rng: Generator, count: int) -> Lengths:
        prompt_len = found.prompt_len if self.prompt is None else whole(self.prompt.draw(rng, count))
        output_len = found.output_len if self.output is None else whole(self.output.draw(rng, count))
        for name, column in (("prompt", prompt_len), ("output", output_len)):
            if column is None:
                raise ConfigError(f"{name}= is missing: nothing says how long a {name} is")
        return Lengths(prompt_len, output_len, found.terms)


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

    def cut(self, lengths: Lengths) -> tuple[Lengths, IntArray]:
        """Return the rows that are left, and their numbers."""
        assert lengths.prompt_len is not None, "limits come after the columns are complete"
        assert lengths.output_len is not None, "limits come after the columns are complete"
        prompt_len, output_len = self.prompt_lens(lengths.prompt_len), self.output_lens(lengths.output_len)
        kept = np.arange(len(prompt_len))
        if self.max_total is not None:
            kept = np.flatnonzero(prompt_len + output_len <= self.max_total)
        return replace(lengths, prompt_len=prompt_len, output_len=output_len).take(kept), kept

    def draw(self, source: LengthSource, rng: Generator, count: int) -> Lengths:
        """Draw `count` rows within the limits; dropped ones are drawn again. Raises ConfigError if hardly any fits."""
        pieces: list[Lengths] = []
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
