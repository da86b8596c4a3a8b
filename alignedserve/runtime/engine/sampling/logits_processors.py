"""Logits processing by each sequence's parameters: penalties, biases, tokens allowed or forbidden, a minimum of tokens.

The changes of all rows of a step are collected on the host when it is launched, copied to the device at once and
applied there together, without waiting for the device.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence
from alignedserve.runtime.device.arrays import Array, to_device
from alignedserve.runtime.engine.sampling.seen_tokens import SeenPlan, SeenRows
from kernels.sampling import Penalties, count_last, mask_tokens_, penalise_

_NOTHING = np.empty(0, np.int64)


class BadWords:
    """Knows which tokens would complete a bad word now. The prompt does not count."""

    __slots__ = ("_endings", "_last", "_lengths")

    def __init__(self, words: Iterable[Sequence[int]], generated: Sequence[int]) -> None:
        self._endings: dict[tuple[int, ...], list[int]] = {}  # last tokens by those before them
        for word in words:
            self._endings.setdefault(tuple(word[:-1]), []).append(word[-1])
        self._lengths = sorted({len(beginning) for beginning in self._endings})
        self._last = list(generated)[-self._lengths[-1] :] if self._lengths[-1] else []

    def record(self, token_id: int) -> None:
        if self._lengths[-1]:
            self._last = [*self._last, token_id][-self._lengths[-1] :]

    def endings(self) -> list[int]:
        num_last = len(self._last)
        beginnings = (tuple(self._last[num_last - length :]) for length in self._lengths if length <= num_last)
        return [token_id for beginning in beginnings for token_id in self._endings.get(beginning, ())]


class LogitsChanges:
    """What a step changes in the logits of its rows, on the host."""

    def __init__(self, arrays: list[Array], seen: SeenPlan | None) -> None:
        self._arrays = arrays
        self._seen = seen

    def apply(self, logits: Tensor, last: Tensor | None = None) -> Tensor:
        """Return the changed logits, float32; for the compute stream. logits [n, vocab_size].

        `last` [n] int64: the last token of each row, where the changes were planned before it was known.
        """
        changed, seen = logits.to(torch.float32, copy=True), self._seen
        seen_arrays = () if seen is None else (seen.rows, *seen.arrays)
        tensors = to_device([*self._arrays, *seen_arrays], logits.device)
        penalties, biased_at, biased_ids, biases, *masks = tensors[: len(self._arrays)]
        if seen is not None:
            rows, *own = tensors[len(self._arrays) :]
            counted = seen.bound(rows, own)
            counted = counted if last is None else count_last(counted, rows, last)
            penalise_(changed, counted, Penalties(*penalties))
        if len(biased_ids):
            changed.index_put_((biased_at, biased_ids), biases, accumulate=True)
        _mask_(changed, *masks)
        return changed


class LogitsProcessor:
    """Processes the logits of the engine's rows. A row is added before its first step and removed when it is freed."""

    def __init__(
        self, *, max_sequences: int, vocab_size: int, eos_token_ids: tuple[int, ...], on_device: bool = False
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._is_changed = np.zeros(max_sequences, np.bool_)  # at every step
        self._may_change: set[int] = set()  # those rows, and those that must not stop early
        self._min_lens = np.zeros(max_sequences, np.int64)  # shorter sequences must not stop
        self._penalties = np.tile(np.array([1.0, 0.0, 0.0], np.float32), (max_sequences, 1))
        self._seen = SeenRows(on_device=on_device)
        self._biases: dict[int, tuple[IntArray, npt.NDArray[np.float32]]] = {}
        self._allowed: dict[int, npt.NDArray[np.int32]] = {}  # a bit for each token of the vocabulary
        self._bad_words: dict[int, BadWords] = {}
        self._stops: dict[int, IntArray] = {}

    def add(self, row: int, sequence: NewSequence) -> None:
        params = sequence.sampling
        self._is_changed[row] = params.changes_logits
        if params.changes_logits or params.min_tokens:
            self._may_change.add(row)
        self._min_lens[row] = sequence.prompt_len + params.min_tokens
        self._penalties[row] = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if params.has_penalties:
            self._seen.add(row, sequence)
        if params.logit_bias:
            known = [(token_id, bias) for token_id, bias in params.logit_bias if 0 <= token_id < self._vocab_size]
            token_ids, biases = np.array([entry[0] for entry in known], np.int64), [entry[1] for entry in known]
            self._biases[row] = token_ids, np.array(biases, np.float32)
        if params.allowed_token_ids:
            self._allowed[row] = self._bits(params.allowed_token_ids)
        if params.bad_words:
            self._bad_words[row] = BadWords(params.bad_words, sequence.token_ids[sequence.prompt_len :])
        if params.min_tokens and not params.grammar:  # else its masks say when it may stop
            stops = (() if params.ignore_eos else self._eos_token_ids) + params.stop_token_ids
            self._stops[row] = self._in_vocabulary(stops)

    def remove(self, row: int) -> None:
        self._may_change.discard(row)
        self._seen.remove(row)
        for of_rows in (self._biases, self._allowed, self._bad_words, self._stops):
            of_rows.pop(row, None)

    def record(self, rows: IntArray, chosen: IntArray) -> None:
        """Record generated tokens, which later penalties count and which may begin a bad word."""
        if not self._seen and not self._bad_words:
            return
        for row, token_id in zip(rows.tolist(), chosen.tolist(), strict=True):
            if row in self._seen:
                self._seen.record(row, token_id)
            if row in self._bad_words:
                self._bad_words[row].record(token_id)

    def needs_tokens(self, rows: IntArray) -> bool:
        return bool(self._bad_words) and any(row in self._bad_words for row in rows.tolist())

    def counts_tokens(self, rows: IntArray) -> bool:
        return bool(self._seen) and any(row in self._seen for row in rows.tolist())

    def changes(self, rows: IntArray, num_tokens: IntArray) -> bool:
        if not self._may_change:
            return False
        return bool((self.is_early(rows, num_tokens) | self._is_changed[rows]).any())

    def plan(self, rows: IntArray, num_tokens: IntArray) -> LogitsChanges | None:
        """Return the changes for a step of these rows; None: there are none. Each plan is carried out, in order.

        num_tokens [n]: tokens of each row so far.
        """
        if not self.changes(rows, num_tokens):
            return None
        own = rows.tolist()
        biased = [(at, *self._biases[row]) for at, row in enumerate(own) if row in self._biases]
        allowed_at = [at for at, row in enumerate(own) if row in self._allowed]
        arrays: list[Array] = [
            np.ascontiguousarray(self._penalties[rows].T),
            *_joined([part[:2] for part in biased]),
            np.concatenate([np.empty(0, np.float32), *(part[2] for part in biased)]),
            np.array(allowed_at, np.int64),
            np.array([self._allowed[own[at]] for at in allowed_at], np.int32),
            *_joined(self._forbidden(rows, num_tokens)),
        ]
        return LogitsChanges(arrays, self._seen.plan(own))

    def _forbidden(self, rows: IntArray, num_tokens: IntArray) -> list[tuple[int, IntArray]]:
        is_early = self.is_early(rows, num_tokens)
        own = rows.tolist()
        stops = [(at, self._stops[row]) for at, row in enumerate(own) if is_early[at] and row in self._stops]
        endings = [(at, self._bad_words[row].endings()) for at, row in enumerate(own) if row in self._bad_words]
        return stops + [(at, self._in_vocabulary(token_ids)) for at, token_ids in endings]

    def _in_vocabulary(self, token_ids: Sequence[int]) -> IntArray:
        return np.array([token_id for token_id in token_ids if 0 <= token_id < self._vocab_size], np.int64)

    def _bits(self, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return a bit for each token of the vocabulary, as `mask_tokens_` takes them: 1 for these.

        Thousands of allowed tokens are no more work at each step than a few.
        """
        is_among = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
        is_among[self._in_vocabulary(token_ids)] = True
        return np.packbits(is_among, bitorder="little").view("<i4")

    def is_early(self, rows: IntArray, num_tokens: IntArray) -> npt.NDArray[np.bool_]:
        is_early: npt.NDArray[np.bool_] = num_tokens < self._min_lens[rows]
        return is_early


def _mask_(logits: Tensor, rows: Tensor, allowed: Tensor, forbidden_at: Tensor, forbidden: Tensor) -> None:
    if len(rows):
        mask_tokens_(logits, rows, allowed)
    if len(forbidden):
        logits[forbidden_at, forbidden] = -float("inf")


def _joined(parts: list[tuple[int, IntArray]]) -> tuple[IntArray, IntArray]:
    places = [np.full(len(token_ids), place) for place, token_ids in parts]
    return np.concatenate([_NOTHING, *places]), np.concatenate([_NOTHING, *(token_ids for _, token_ids in parts)])
