"""Tokens that sequences with penalties have seen, and how often each was generated.

They are counted on the host. A device has a copy of its own, to which a step brings what was counted since the one
before: a few bytes for each sequence, where all that it has seen may be megabytes. A step that is launched before its
last tokens are on the host counts those where they lie, for itself alone; so a step that is dropped changes nothing.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence
from alignedserve.runtime.device.arrays import Array
from kernels.sampling import SeenTokens

_FIRST_WIDTH = 64  # tokens of a sequence that there is room for at first


class _Counts(NamedTuple):
    token_ids: IntArray
    counts: npt.NDArray[np.int32]


class TokenCounts:
    """The distinct tokens of one sequence and how often each was generated, each in a place that it keeps."""

    __slots__ = ("_changed", "_counts", "_place_of", "_token_ids")

    def __init__(self, token_ids: Sequence[int], prompt_len: int) -> None:
        # In a few calls: token by token a long prompt would hold up the step that it joins for tens of milliseconds.
        self._place_of = {token_id: place for place, token_id in enumerate(dict.fromkeys(token_ids))}
        width = max(len(self._place_of), _FIRST_WIDTH)
        self._token_ids, self._counts = np.zeros(width, np.int64), np.zeros(width, np.int32)
        self._token_ids[: len(self)] = list(self._place_of)
        for token_id, count in Counter(token_ids[prompt_len:]).items():
            self._counts[self._place_of[token_id]] = count
        self._changed = dict.fromkeys(range(len(self)))  # places, since they were last taken

    def __len__(self) -> int:
        return len(self._place_of)

    def record(self, token_id: int) -> None:
        place = self._place_of.setdefault(token_id, len(self._place_of))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[place] = token_id
        self._counts[place] += 1
        self._changed[place] = None

    @property
    def all(self) -> _Counts:
        return _Counts(self._token_ids[: len(self)], self._counts[: len(self)])

    def take_changed(self) -> tuple[IntArray, _Counts]:
        places = np.array(list(self._changed), np.int64)
        self._changed.clear()
        return places, _Counts(self._token_ids[places], self._counts[places])


class SeenPlan(Protocol):
    """What the rows of one step have seen, as it was when the step was planned."""

    rows: IntArray  # places among the step's rows, of those with penalties
    arrays: tuple[Array, ...]  # to be brought to the device

    def bound(self, rows: Tensor, tensors: Sequence[Tensor]) -> SeenTokens:
        """Return the tokens; for the compute stream. `rows`, `tensors`: rows and arrays on the device."""


class SeenRows:
    """What rows have seen. A row is added before its first step and removed when it is freed."""

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
        seen = [(place, row) for place, row in enumerate(rows) if row in self._counts]
        if not seen:
            return None
        if self._copy is not None:
            return self._copy.plan(seen, self._counts)
        return _WholePlan([(place, self._counts[row].all) for place, row in seen])


class _WholePlan:
    def __init__(self, seen: list[tuple[int, _Counts]]) -> None:
        self.rows = np.array([place for place, _ in seen], np.int64)
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
        places = np.concatenate([own for own, _ in changed])
        changes = (
            np.repeat(np.array(lines), [len(own) for own, _ in changed]),
            places,
            np.concatenate([own.token_ids for _, own in changed]),
            np.concatenate([own.counts for _, own in changed]),
        )
        whose = np.array([place for place, _ in seen], np.int64)
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
