"""Recurrences in plain PyTorch: one token after another, those of all sequences of a pass together."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.state_scans import GatedForm, gate_rows_, scan_level, suits_gates
from kernels.norm import RmsNorm
from kernels.states.convolution import silu_in_place
from kernels.states.device_rows import DeviceStateRows
from kernels.states.state_rows import NO_BLOCK, StateRows

# (states [sequences, ..], token rows [sequences]) -> states, results [sequences, ..]
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def run_steps(rows: StateRows, states: Tensor, step: Step, out: Tensor) -> None:
    firsts, counts = torch.from_numpy(rows.firsts), torch.from_numpy(rows.counts)
    sources = torch.from_numpy(rows.sources)
    current = states.index_select(0, sources.clamp(min=0))
    current[sources == NO_BLOCK] = 0
    sequence_of = torch.repeat_interleave(torch.arange(len(firsts)), torch.from_numpy(rows.first_parts).diff())
    ends, targets = torch.from_numpy(rows.ends), torch.from_numpy(rows.targets)
    steps = ends - firsts[sequence_of]  # after which a part's state is left
    for index in range(int(counts.max())):
        active = (counts > index).nonzero()[:, 0]
        tokens = firsts[active] + index
        current[active], out[tokens] = step(current[active], tokens)
        left = (steps == index).nonzero()[:, 0]
        states.index_copy_(0, targets[left], current[sequence_of[left]])


class GatedRows:
    """Results [tokens, groups * width] float32, times the silu of their gates, and normalised group by group."""

    def __init__(self, width: int, weight: Tensor | None, form: GatedForm) -> None:
        self._weight, self._form = None if weight is None else weight.contiguous(), form
        self._norm = RmsNorm(torch.ones(width // form.num_groups), form.eps, torch.float32)

    def __call__(self, x: Tensor, gates: Tensor, rows: StateRows | DeviceStateRows) -> Tensor:
        """Gate x, which is overwritten, by gates [tokens, groups * width] -> the same, dtype of the gates.

        `rows`: of the pass.
        """
        if isinstance(rows, DeviceStateRows):
            gated: Tensor = rows.kernels.scans.gate_rows(x, gates, self._weight, self._form)
            return gated
        level = scan_level(x)
        if level is not None and suits_gates(gates, self._form.num_groups):
            return gate_rows_(x, gates, self._weight, self._form, level=level)
        factors = silu_in_place(gates.to(torch.float32, memory_format=torch.contiguous_format, copy=True))
        if self._form.gates_first or self._weight is None:
            x = x.mul_(factors)
        if self._weight is not None:
            x = self._norm(x.view(len(x) * self._form.num_groups, -1)).view(x.shape).mul_(self._weight)
        if self._weight is not None and not self._form.gates_first:
            x = x.mul_(factors)
        return x.to(gates.dtype)
