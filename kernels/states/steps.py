"""Recurrences in plain PyTorch: one token after another, those of all sequences of a pass together."""

from collections.abc import Callable

import torch
from torch import Tensor

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
