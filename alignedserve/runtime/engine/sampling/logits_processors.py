"""Logits processing by each sequence's parameters: penalties, biases, tokens allowed or forbidden, a minimum of tokens.

The changes of all rows of a step are collected on the host when it is launched, copied to the device at once and
applied there together, without waiting for the device."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence
from alignedserve.runtime.device.arrays import Array, to_device
from kernels.sampling import Penalties, SeenTokens, count_last, mask_tokens_, penalise_

_FIRST_WIDTH = 64  # tokens of a sequence that there is room for at first


class _Counts(NamedTuple):
    token_ids: IntArray
    counts: npt.NDArray[np.int32]


class TokenCounts:
    """The distinct tokens of one sequence and how often each was generated, each in a place that it keeps."""

    __slots__ = ("_changed", "_counts", "_place_of", "_token_ids")

    def __init__(self, token_ids: Sequence[int], prompt_len: int) -> None:
        # In a few calls: token by token a long prompt would hold up the step that it joins for tens of milliseconds.
        self._place_of = {token_id: index for index, token_id in enumerate(dict.fromkeys(token_ids))}
        width = max(len(self._place_of), _FIRST_WIDTH)
        self._token_ids, self._counts = np.zeros(width, np.int64), np.zeros(width, np.int32)
        self._token_ids[: len(self)] = list(self._place_of)
        for token_id, count in Counter(token_ids[prompt_len:]).items():
            self._counts[self._place_of[token_id]] = count
        self._changed = dict.fromkeys(range(len(self)))  # places, since they were last taken

    def __len__(self) -> int:
        return len(self._place_of)

    def record(self, token_id: int) -> None:
        index = self._place_of.setdefault(token_id, len(self._place_of))
        if index == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[index] = token_id
        self._counts[index] += 1
        self._changed[index] = None

    @property
    def all(self) -> _Counts:
        return _Counts(self._token_ids[: len(self)], self._counts[: len(self)])

    def take_changed(self) -> tuple[IntArray, _Counts]:
        places = np.array(list(self._changed), np.int64)
        self._changed.clear()
        return places, _Counts(self._token_ids[places], self._counts[places])


class SeenPlan(Protocol):
    """Tokens that the rows of a step have seen when the step was planned."""

    rows: IntArray  # places among the step's rows, of those with penalties
    arrays: tuple[Array, ...]  # to be brought to the device

    def bound(self, rows: Tensor, tensors: Sequence[Tensor]) -> SeenTokens:
        """Return the tokens; for the compute stream. `rows`, `tensors`: rows and arrays on the device."""


class SeenRows:
    """The tokens that rows with penalties have seen, counted on the host. A device has a copy, to which a step brings
    what was counted since the step before: a few bytes for each sequence, where all may be megabytes. A step that is
    launched before its last tokens are on the host counts those on the device, for itself alone; a step that is dropped
    changes nothing."""

    def __init__(self, *, on_device: bool) -> None:
        """`on_device`: a copy is kept where the logits are; else all of it is brought there for each step."""
        self._counts: dict[int, TokenCounts] = {}
        self._copy = _DeviceCopy() if on_device else None

    def __contains__(self, row: int) -> bool:
        return row in self._counts

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, row: int, sequence: NewSequence) -> None:
        self._counts[row] = TokenCounts(sequence.token_ids, sequence.prompt_len)

    def remove(self, row: int) -> None:
        if self._counts.pop(row, None) is not None and self._copy is not None:
            self._copy.remove(row)

    def record(self, row: int, token_id: int) -> None:
        self._counts[row].record(token_id)

    def plan(self, rows: Sequence[int]) -> SeenPlan | None:
        """Return what these rows of a step have seen; None: none of them has penalties. Each plan is carried out."""
        seen = [(index, row) for index, row in enumerate(rows) if row in self._counts]
        if not seen:
            return None
        if self._copy is not None:
            return self._copy.plan(seen, self._counts)
        return _WholePlan([(index, self._counts[row].all) for index, row in seen])


class _WholePlan:
    def __init__(self, seen: list[tuple[int, _Counts]]) -> None:
        self.rows = np.array([index for index, _ in seen], np.int64)
        lengths = [len(counts.token_ids) for _, counts in seen]
        token_ids = np.concatenate([counts.token_ids for _, counts in seen])
        self.arrays: tuple[Array, ...] = (
            np.repeat(self.rows, lengths),
            token_ids,
            np.concatenate([counts.counts for _, counts in seen]),
        )

    def bound(self, rows: Tensor, tensors: Sequence[Tensor]) -> SeenTokens:
        return SeenTokens(*tensors)


class _DeviceCopy:
    def __init__(self) -> None:
        self._line_of: dict[int, int] = {}
        self._free: list[int] = []
        # On the device, [lines, places]; for the compute stream. Made by the first step that needs them.
        self._token_ids: Tensor | None = None
        self._counts: Tensor | None = None

    def remove(self, row: int) -> None:
        line = self._line_of.pop(row, None)
        if line is not None:
            self._free.append(line)

    def plan(self, seen: list[tuple[int, int]], counts: dict[int, TokenCounts]) -> "_ChangedPlan":
        lines = [self._line(row) for _, row in seen]
        lengths = [len(counts[row]) for _, row in seen]
        changed = [counts[row].take_changed() for _, row in seen]
        places = np.concatenate([indices for indices, _ in changed])
        changes = (
            np.repeat(np.array(lines), [len(indices) for indices, _ in changed]),
            places,
            np.concatenate([token_counts.token_ids for _, token_counts in changed]),
            np.concatenate([token_counts.counts for _, token_counts in changed]),
        )
        whose = np.array([index for index, _ in seen], np.int64)
        return _ChangedPlan(self, whose, np.array(lines, np.int64), np.array(lengths, np.int64), changes)

    def lines_for(self, num_lines: int, num_places: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._token_ids is None or self._counts is None:
            shape = (_power_of_two(num_lines), _power_of_two(max(num_places, _FIRST_WIDTH)))
            self._token_ids = torch.zeros(shape, dtype=torch.int64, device=device)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
        lines, places = self._token_ids.shape
        if num_lines > lines or num_places > places:
            added = (
                0,
                _power_of_two(max(num_places, places)) - places,
                0,
                _power_of_two(max(num_lines, lines)) - lines,
            )
            self._token_ids = torch.nn.functional.pad(self._token_ids, added)
            self._counts = torch.nn.functional.pad(self._counts, added)
        return self._token_ids, self._counts

    def _line(self, row: int) -> int:
        if row not in self._line_of:
            self._line_of[row] = self._free.pop() if self._free else len(self._line_of)
        return self._line_of[row]


class _ChangedPlan:
    def __init__(
        self, copy: _DeviceCopy, rows: IntArray, lines: IntArray, lengths: IntArray, changes: tuple[Array, ...]
    ) -> None:
        self.rows = rows
        self.arrays = (lines, lengths, *changes)
        self._copy = copy
        self._needed = int(lines.max()) + 1, int(lengths.max())
        self._num_tokens = int(lengths.sum())

    def bound(self, rows: Tensor, tensors: Sequence[Tensor]) -> SeenTokens:
        lines, lengths, changed_lines, places, changed_ids, changed_counts = tensors
        token_ids, counts = self._copy.lines_for(*self._needed, rows.device)
        token_ids[changed_lines, places] = changed_ids
        counts[changed_lines, places] = changed_counts
        # With the number of all tokens the device need not be asked for it.
        of_token = torch.arange(len(rows), device=rows.device)
        of_token = of_token.repeat_interleave(lengths, output_size=self._num_tokens)
        first = (lengths.cumsum(0) - lengths)[of_token]
        at = lines[of_token], torch.arange(self._num_tokens, device=rows.device) - first
        return SeenTokens(rows[of_token], token_ids[at], counts[at])


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


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
        """Return the changed logits, float32; for the compute stream. logits [n, vocab_size]. `last` [n] int64: the
        last token of each row, where the changes were planned before it was known."""
        changed, seen = logits.to(torch.float32, copy=True), self._seen
        seen_arrays = () if seen is None else (seen.rows, *seen.arrays)
        tensors = to_device([*self._arrays, *seen_arrays], logits.device)
        penalties, biased_at, biased_ids, biases, *masks = tensors[: len(self._arrays)]
        if seen is not None:
            rows, *arrays = tensors[len(self._arrays) :]
            counted = seen.bound(rows, arrays)
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
        num_tokens [n]: tokens of each row so far."""
        if not self.changes(rows, num_tokens):
            return None
        row_list = rows.tolist()
        biased = [(at, *self._biases[row]) for at, row in enumerate(row_list) if row in self._biases]
        allowed_at = [at for at, row in enumerate(row_list) if row in self._allowed]
        arrays: list[Array] = [
            np.ascontiguousarray(self._penalties[rows].T),
            *_joined([part[:2] for part in biased]),
            np.concatenate([np.empty(0, np.float32), *(part[2] for part in biased)]),
            np.array(allowed_at, np.int64),
            np.array([self._allowed[row_list[at]] for at in allowed_at], np.int32),
            *_joined(self._forbidden(rows, num_tokens)),
        ]
        return LogitsChanges(arrays, self._seen.plan(row_list))

    def _forbidden(self, rows: IntArray, num_tokens: IntArray) -> list[tuple[int, IntArray]]:
        is_early = self.is_early(rows, num_tokens)
        row_list = rows.tolist()
        stops = [(at, self._stops[row]) for at, row in enumerate(row_list) if is_early[at] and row in self._stops]
        endings = [(at, self._bad_words[row].endings()) for at, row in enumerate(row_list) if row in self._bad_words]
        return stops + [(at, self._in_vocabulary(token_ids)) for at, token_ids in endings]

    def _in_vocabulary(self, token_ids: Sequence[int]) -> IntArray:
        return np.array([token_id for token_id in token_ids if 0 <= token_id < self._vocab_size], np.int64)

    def _bits(self, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return a bit for each token of the vocabulary, as `mask_tokens_` takes them: 1 for these. Thousands of
        allowed tokens are no more work at each step than a few."""
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
    places = [np.full(len(token_ids), index) for index, token_ids in parts]
    return np.concatenate([_NOTHING, *places]), np.concatenate([_NOTHING, *(token_ids for _, token_ids in parts)])
