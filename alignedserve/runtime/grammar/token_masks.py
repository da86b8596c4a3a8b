"""Masks of the next token for the rows of an engine, computed in threads beside the forward pass.

A mask is a row of bits, one per token, the lowest of a word first.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from alignedserve.core.request import SamplingParams
from alignedserve.runtime.grammar.answer_matcher import AnswerMatcher
from alignedserve.runtime.grammar.compiler import GrammarCompiler, GrammarError, failure_of

IntArray = npt.NDArray[np.int64]
Bits = npt.NDArray[np.int32]


class StepMasks(NamedTuple):
    """The masks of one step."""

    at: IntArray  # the rows that have one, as places in the step's rows
    bits: Bits  # [rows that have one, words]; a row of zeros: its grammar failed


@dataclass(slots=True)
class _Constrained:
    """One row with a grammar."""

    matcher: AnswerMatcher
    unwanted: "_LastResorts | None"  # tokens that may end the answer only if nothing else may follow
    unwanted_early: "_LastResorts | None"  # the same before the answer has its minimal length
    failure: str | None = None


class TokenMasks:
    """The grammars of an engine's rows. A row is added before its first step and removed when it is freed."""

    def __init__(
        self, compiler: GrammarCompiler, *, vocab_size: int, eos_token_ids: tuple[int, ...], num_threads: int
    ) -> None:
        self._compiler = compiler
        self._num_words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._rows: dict[int, _Constrained] = {}
        self._thread = ThreadPoolExecutor(1, "masks")
        self._executor = LLExecutor(num_threads)

    def add(self, row: int, sampling: SamplingParams, generated_token_ids: tuple[int, ...]) -> None:
        """Add a row whose sequence has a grammar, and what it has generated so far."""
        ends = self._eos_token_ids if sampling.ignore_eos else ()
        early_ends = (*self._eos_token_ids, *sampling.stop_token_ids) if sampling.min_tokens else ends
        matcher = AnswerMatcher(self._compiler.compile(sampling.grammar), generated_token_ids)
        self._rows[row] = _Constrained(matcher, self._last_resorts(ends), self._last_resorts(early_ends))

    def remove(self, row: int) -> None:
        """Remove the row, if it has a grammar."""
        self._rows.pop(row, None)

    def record(self, rows: IntArray, chosen: IntArray) -> None:
        """Note the tokens that were chosen for these rows."""
        if not self._rows:
            return
        for row, token_id in zip(rows.tolist(), chosen.tolist(), strict=True):
            constrained = self._rows.get(row)
            if constrained is not None:
                constrained.matcher.append(token_id)

    def has_any(self, rows: IntArray) -> bool:
        """Return whether one of these rows has a grammar."""
        return bool(self._rows) and any(row in self._rows for row in rows.tolist())

    def failure(self, row: int) -> str | None:
        """Return why the row's grammar could not be followed, if it could not."""
        constrained = self._rows.get(row)
        return None if constrained is None else constrained.failure

    def start(self, rows: IntArray, is_early: npt.NDArray[np.bool_]) -> "Future[StepMasks]":
        """Begin to compute the masks of a step. `is_early`: which of its rows lack tokens of their minimal length.

        No other method may be called before the result is there.
        """
        own = [(at, self._rows[row]) for at, row in enumerate(rows.tolist()) if row in self._rows]
        return self._thread.submit(self._compute, own, is_early)

    def close(self) -> None:
        """End the threads."""
        self._thread.shutdown()

    def _compute(self, own: list[tuple[int, _Constrained]], is_early: npt.NDArray[np.bool_]) -> StepMasks:
        bits = np.zeros((len(own), self._num_words), np.int32)
        self._fill(bits, [constrained for _, constrained in own])
        for place, (at, constrained) in enumerate(own):
            unwanted = constrained.unwanted_early if is_early[at] else constrained.unwanted
            if unwanted is not None:
                unwanted.remove_from(bits[place])
        return StepMasks(np.array([at for at, _ in own], np.int64), bits)

    def _fill(self, bits: Bits, own: list[_Constrained]) -> None:
        """Write the masks of all rows but those whose grammars fail, all at once."""
        matchers: list[tuple[LLMatcher, int]] = []
        for place, constrained in enumerate(own):
            try:
                matchers.append((constrained.matcher.current(), place))
            except GrammarError as error:
                constrained.failure = str(error)
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(own))
        for matcher, place in matchers:
            if matcher.is_error():
                own[place].failure = failure_of(matcher)
                bits[place] = 0

    def _last_resorts(self, token_ids: tuple[int, ...]) -> "_LastResorts | None":
        known = [token_id for token_id in token_ids if 0 <= token_id < self._vocab_size]
        return _LastResorts(known) if known else None


class _LastResorts:
    """Tokens that are allowed only where no other is."""

    __slots__ = ("_masks", "_words")

    def __init__(self, token_ids: list[int]) -> None:
        masks: dict[int, int] = {}
        for token_id in token_ids:
            masks[token_id >> 5] = masks.get(token_id >> 5, 0) | 1 << (token_id & 31)
        self._words = np.array(list(masks), np.int64)
        self._masks = np.array(list(masks.values()), np.uint32).view(np.int32)

    def remove_from(self, bits: Bits) -> None:
        """Take them out of a mask [words], unless nothing would be left."""
        before = bits[self._words]
        if not (before & self._masks).any():  # as at most places in an answer
            return
        bits[self._words] = before & ~self._masks
        if not bits.any():
            bits[self._words] = before
