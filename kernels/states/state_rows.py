"""Where the sequences of one pass read their states, and where they leave them.

A state lies in a block, behind the keys and values of the block's tokens, and is what the layer keeps of everything up
to the last of these that is computed. A sequence that goes on into its next block writes there from then on: the full
block keeps the state at its end, from which any other sequence with the same beginning may go on.

Or each sequence has blocks for its states alone: a row of them, a column for some of the layers. It continues in them,
and writes its states elsewhere on request.

The rows of a pass through states as kernels on a GPU take them: arrays that come with those of the pass."""

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.gpu_dispatch import fused_kernels

IntArray = npt.NDArray[np.int64]
NO_BLOCK = -1


class StateRows:
    """The token rows of a pass, sequence by sequence, each cut where it leaves a state."""

    __slots__ = (
        *("_convolved", "_further", "counts", "ends", "first_parts", "firsts"),
        *("num_tokens", "sources", "targets"),
    )

    def __init__(
        self, firsts: IntArray, sources: IntArray, parts: "StateParts", further: Sequence["StateColumn"] = ()
    ) -> None:
        """`firsts`, `sources` [sequences]: the first token row, and the block that has the state before it; NO_BLOCK:
        nothing is before. `further`: the columns behind the first, whose blocks are those here."""
        self.firsts, self.sources = firsts, sources
        self.ends, self.targets, self.num_tokens, sequences = parts
        # [sequences + 1] and [sequences]: the first part of each, and how many tokens it computes.
        self.first_parts: IntArray = np.searchsorted(sequences, np.arange(len(firsts) + 1))
        self.counts: IntArray = self.ends[self.first_parts[1:] - 1] - firsts + 1
        self._convolved: ConvolvedRows | None = None
        self._further: list[StateRows | StateColumn] = [*further]

    def at(self, column: int) -> "StateRows":
        """Return the same rows with the blocks of a column."""
        if not column:
            return self
        further = self._further[column - 1]
        if isinstance(further, StateColumn):
            rows = copy(self)
            rows.sources, rows.targets, rows._further = *further, []
            if self._convolved is not None:
                rows._convolved = self._convolved.at(further)
            self._further[column - 1] = further = rows
        return further

    @property
    def num_columns(self) -> int:
        """Return how many blocks have the states of a sequence."""
        return 1 + len(self._further)

    @property
    def num_tokens_in_pass(self) -> int:
        """Return the token rows of all sequences."""
        return int(self.counts.sum())

    @property
    def host_arrays(self) -> tuple[IntArray, ...]:
        """Return the arrays that kernels on a device read; none: these rows are for a CPU."""
        return ()

    def bound(self, tensors: Sequence[Tensor]) -> "StateRows":
        """Return the same rows: nothing of them is on a device."""
        assert not tensors, "arrays for a CPU"
        return self

    def padded(self, count: int, block: int) -> "StateRows":
        """Return the same rows and behind them `count` of one token each, which leave what they make in this block."""
        if not count:
            return self
        columns = [self.at(column) for column in range(self.num_columns)]
        firsts = self.num_tokens_in_pass + np.arange(count)
        sources = [np.append(column.sources, np.full(count, NO_BLOCK)) for column in columns]
        targets = [np.append(column.targets, np.full(count, block)) for column in columns]
        sequences = np.repeat(np.arange(len(self.firsts)), np.diff(self.first_parts))
        parts = StateParts(
            np.append(self.ends, firsts),
            targets[0],
            np.append(self.num_tokens, np.ones(count, np.int64)),
            np.append(sequences, len(self.firsts) + np.arange(count)),
        )
        further = [StateColumn(*pair) for pair in zip(sources[1:], targets[1:], strict=True)]
        return StateRows(np.append(self.firsts, firsts), sources[0], parts, further)

    def convolved(self, num_before: int) -> "ConvolvedRows":
        """Return the rows of convolutions that read so many tokens before each, the same on all layers."""
        if self._convolved is None or self._convolved.num_before != num_before:
            self._convolved = ConvolvedRows(self, num_before)
        return self._convolved


class StateColumn(NamedTuple):
    """The blocks of some layers' states."""

    sources: IntArray  # [sequences]
    targets: IntArray  # [parts]


class StateParts(NamedTuple):
    """The parts of a pass's sequences, in order; behind each its state is left in a block. All [parts] int64."""

    ends: IntArray  # token row of the last token
    targets: IntArray  # the block
    num_tokens: IntArray  # of the context up to there
    sequences: IntArray  # ascending


class ConvolvedRows:
    """The token rows of a pass with the rows before each sequence's first, which its state has, in front of them."""

    def __init__(self, rows: StateRows, num_before: int) -> None:
        self.num_before = num_before
        num_sequences, num_tokens = len(rows.firsts), int(rows.counts.sum())
        self.num_rows = num_tokens + num_sequences * num_before
        starts = rows.firsts + np.arange(num_sequences) * num_before
        before = np.arange(num_before)
        order = np.arange(num_tokens) + num_before * np.repeat(np.arange(1, num_sequences + 1), rows.counts)
        has_state = rows.sources != NO_BLOCK
        self.is_one = num_sequences == 1
        self.own = torch.from_numpy(order)  # [tokens]: their places
        self.kept = torch.from_numpy((starts[has_state, None] + before).reshape(-1))  # places of rows from states
        self.fresh = torch.from_numpy((starts[~has_state, None] + before).reshape(-1))  # of those that are zeros
        self.sources = torch.from_numpy(rows.sources[has_state])
        self.left = torch.from_numpy((order[rows.ends][:, None] - before[::-1]).reshape(-1))  # places of rows to states
        self.targets = torch.from_numpy(rows.targets)

    def at(self, column: StateColumn) -> "ConvolvedRows":
        rows = copy(self)
        rows.sources = torch.from_numpy(column.sources[column.sources != NO_BLOCK])
        rows.targets = torch.from_numpy(column.targets)
        return rows


class StateMixer(Protocol):
    """A layer's tokens, mixed through its state."""

    def __call__(self, projected: Tensor, rows: Any, state: Sequence[Tensor]) -> Tensor:
        """Compute projected [tokens, in_width] -> [tokens, out_width], between the layer's two products.

        rows    StateRows, or DeviceStateRows on a GPU
        state   its parts, each [blocks, ..]; those of `rows.targets` are written"""


class StateKernels(NamedTuple):
    """The modules of kernels.gpu that compute states."""

    scans: Any  # state_scans
    convolutions: Any  # state_convolutions


def state_kernels(device: torch.device) -> StateKernels | None:
    """Return what computes states on a device; None: it has no such kernels."""
    scans = fused_kernels("state_scans", device, torch.float32)
    convolutions = fused_kernels("state_convolutions", device, torch.float32)
    return None if scans is None or convolutions is None else StateKernels(scans, convolutions)


class DeviceStatePlan:
    """The arrays of one pass, on the host."""

    def __init__(self, kernels: StateKernels, rows: StateRows) -> None:
        self._kernels = kernels
        self.num_columns, self._num_parts = rows.num_columns, len(rows.ends)
        # Whether a recorded pass of as many rows may read the arrays: a token and a state of each.
        self.is_of_a_graph = len(rows.ends) == len(rows.firsts) == rows.num_tokens_in_pass
        columns = [rows.at(column) for column in range(rows.num_columns)]
        self.host_arrays: tuple[IntArray, ...] = (
            rows.firsts,
            rows.first_parts.astype(np.int64),
            rows.ends,
            rows.num_tokens,
            np.repeat(np.arange(len(rows.firsts)), rows.counts),
            np.concatenate([column.sources for column in columns]),
            np.concatenate([column.targets for column in columns]),
        )

    def bound(self, tensors: Sequence[Tensor]) -> "DeviceStateRows":
        """Return the rows. `tensors`: the host arrays on the device, flat."""
        firsts, first_parts, ends, num_tokens, sequences, sources, targets = tensors
        of_columns = (sources.view(self.num_columns, -1), targets.view(self.num_columns, -1))
        return DeviceStateRows(self._kernels, firsts, first_parts, ends, num_tokens, sequences, *of_columns)


class DeviceStateRows(NamedTuple):
    """The token rows of one pass, see StateRows; all int64 on the device."""

    kernels: StateKernels
    firsts: Tensor  # [sequences]
    first_parts: Tensor  # [sequences + 1]
    ends: Tensor  # [parts]
    num_tokens: Tensor  # [parts]
    sequences: Tensor  # [tokens] the sequence of each token row
    all_sources: Tensor  # [columns, sequences]
    all_targets: Tensor  # [columns, parts]
    column: int = 0

    @property
    def sources(self) -> Tensor:
        """Return the blocks that have the states before each sequence [sequences]; NO_BLOCK: nothing is before."""
        return self.all_sources[self.column]

    @property
    def targets(self) -> Tensor:
        """Return the block that each part leaves its state in [parts]."""
        return self.all_targets[self.column]

    def at(self, column: int) -> "DeviceStateRows":
        """Return the same rows with the blocks of a column."""
        return self._replace(column=column)


def one_token(device: torch.device) -> DeviceStateRows:
    """Return the rows of one token, for trial launches: it goes on from block 0, and leaves its state there."""
    start, bounds = torch.zeros(1, dtype=torch.int64, device=device), torch.arange(2, device=device)
    return DeviceStateRows(StateKernels(None, None), start, bounds, start, start + 1, start, start[None], start[None])
