"""The rows of a pass through states as kernels on a GPU take them: arrays that come with those of the pass."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.gpu_dispatch import fused_kernels
from kernels.states.state_rows import IntArray, StateRows


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
