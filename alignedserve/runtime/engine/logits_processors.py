"""Logits processing by each sequence's parameters: penalties, biases, and a minimum of tokens.

The changes of all rows of a step are collected on the host, copied to the device at once and applied there together,
without waiting for the device.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence
from alignedserve.runtime.device.arrays import to_device
from kernels.sampling import Penalties, SeenTokens, penalise_

_NOTHING = np.empty(0, np.int64)


class LogitsProcessor:
    """Processes the logits of the engine's rows. A row is added before its first step and removed when it is freed."""

    def __init__(self, *, max_sequences: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._is_changed = np.zeros(max_sequences, np.bool_)  # by penalties or biases, at every step
        self._min_lens = np.zeros(max_sequences, np.int64)  # shorter sequences must not stop
        self._penalties = np.tile(np.array([1.0, 0.0, 0.0], np.float32), (max_sequences, 1))
        self._seen: dict[int, _SeenTokens] = {}
        self._biases: dict[int, tuple[IntArray, npt.NDArray[np.float32]]] = {}
        self._stops: dict[int, IntArray] = {}

    def add(self, row: int, sequence: NewSequence) -> None:
        """Add the sequence's parameters and the tokens that it already has."""
        params = sequence.sampling
        self._is_changed[row] = params.has_penalties or bool(params.logit_bias)
        self._min_lens[row] = sequence.prompt_len + params.min_tokens
        self._penalties[row] = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if params.has_penalties:
            self._seen[row] = _SeenTokens(sequence)
        if params.logit_bias:
            known = [(token_id, bias) for token_id, bias in params.logit_bias if 0 <= token_id < self._vocab_size]
            token_ids, biases = np.array([entry[0] for entry in known], np.int64), [entry[1] for entry in known]
            self._biases[row] = token_ids, np.array(biases, np.float32)
        if params.min_tokens and not params.grammar:  # else its masks say when it may stop
            stops = (() if params.ignore_eos else self._eos_token_ids) + params.stop_token_ids
            self._stops[row] = np.array([stop for stop in stops if 0 <= stop < self._vocab_size], np.int64)

    def remove(self, row: int) -> None:
        """Remove the row."""
        for of_rows in (self._seen, self._biases, self._stops):
            of_rows.pop(row, None)

    def record(self, rows: IntArray, chosen: IntArray) -> None:
        """Record generated tokens, which later penalties count."""
        if not self._seen:
            return
        for row, token_id in zip(rows.tolist(), chosen.tolist(), strict=True):
            if row in self._seen:
                self._seen[row].record(token_id)

    def changes(self, rows: IntArray, num_tokens: IntArray) -> bool:
        """Return whether `apply` changes the logits of any of these rows."""
        return bool((self.is_early(rows, num_tokens) | self._is_changed[rows]).any())

    def apply(self, rows: IntArray, num_tokens: IntArray, logits: Tensor) -> Tensor:
        """Return the processed logits of these rows, float32; the same tensor where there is nothing to change.

        logits [n, vocab_size]; num_tokens [n]: tokens of each row so far.
        """
        if not self.changes(rows, num_tokens):
            return logits
        is_early = self.is_early(rows, num_tokens)
        changed = logits.to(torch.float32, copy=True)
        own = rows.tolist()
        seen = [(at, *self._seen[row].arrays) for at, row in enumerate(own) if row in self._seen]
        biased = [(at, *self._biases[row]) for at, row in enumerate(own) if row in self._biases]
        stopped = [(at, self._stops[row]) for at, row in enumerate(own) if is_early[at] and row in self._stops]
        arrays = [
            *_joined([part[:2] for part in seen]),
            np.concatenate([np.empty(0, np.int32), *(part[2] for part in seen)]),
            np.ascontiguousarray(self._penalties[rows].T),
            *_joined([part[:2] for part in biased]),
            np.concatenate([np.empty(0, np.float32), *(part[2] for part in biased)]),
            *_joined(stopped),
        ]
        seen_at, seen_ids, counts, penalties, biased_at, biased_ids, biases, stopped_at, stopped_ids = to_device(
            arrays, logits.device
        )
        if len(seen_ids):
            penalise_(changed, SeenTokens(seen_at, seen_ids, counts), Penalties(*penalties))
        if len(biased_ids):
            changed.index_put_((biased_at, biased_ids), biases, accumulate=True)
        if len(stopped_ids):
            changed[stopped_at, stopped_ids] = -float("inf")
        return changed

    def is_early(self, rows: IntArray, num_tokens: IntArray) -> npt.NDArray[np.bool_]:
        """Return which of these rows must not stop yet."""
        is_early: npt.NDArray[np.bool_] = num_tokens < self._min_lens[rows]
        return is_early


class _SeenTokens:
    """The distinct tokens of one sequence and how often each was generated, for its penalties."""

    __slots__ = ("_counts", "_index_of", "_token_ids")

    def __init__(self, sequence: NewSequence) -> None:
        self._index_of: dict[int, int] = {}
        self._token_ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.int32)
        for position, token_id in enumerate(sequence.token_ids):
            self.record(token_id, is_generated=position >= sequence.prompt_len)

    @property
    def arrays(self) -> tuple[IntArray, npt.NDArray[np.int32]]:
        """Return token ids [seen] and their counts [seen]."""
        num_seen = len(self._index_of)
        return self._token_ids[:num_seen], self._counts[:num_seen]

    def record(self, token_id: int, *, is_generated: bool = True) -> None:
        """Count one more token."""
        index = self._index_of.setdefault(token_id, len(self._index_of))
        if index == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[index] = token_id
        self._counts[index] += is_generated


def _joined(parts: list[tuple[int, IntArray]]) -> tuple[IntArray, IntArray]:
    """Concatenate token ids of several rows; return the row index of each, and the token ids."""
    places = [np.full(len(token_ids), place) for place, token_ids in parts]
    return np.concatenate([_NOTHING, *places]), np.concatenate([_NOTHING, *(token_ids for _, token_ids in parts)])
