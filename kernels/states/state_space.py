"""Mamba-2's mixer (Dao and Gu, 2024): a convolution, and a state that each head fades and adds to, token by token.

Of a head with inputs x, and b and c that a group of heads shares: state = exp(-exp(a) dt) state + dt b x^T, and the
result is c^T state + skip * x. Tokens pass one after another, on a CPU while the state is in a core's cache: a result
does not depend on how a prompt was cut, and a prompt costs no more than reading x, b and c."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.state_scans import GatedForm, scan_level, scan_space, suits_space
from kernels.states.convolution import causal_convolution
from kernels.states.delta_rule import GatedRows, run_steps
from kernels.states.state_rows import DeviceStateRows, StateRows


class SpaceSizes(NamedTuple):
    """The sizes of a layer's heads."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int

    @property
    def inner(self) -> int:
        """Return the elements of all heads' inputs."""
        return self.num_heads * self.head_dim

    @property
    def shared(self) -> int:
        """Return the elements of all groups' b, or c."""
        return self.num_groups * self.state_size


class SpaceWeights(NamedTuple):
    """The weights between a layer's two products, float32."""

    convolution: Tensor  # [kernel_size, inner + 2 * shared]
    convolution_bias: Tensor | None
    log_decay: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    skip: Tensor  # [heads]
    norm: Tensor | None  # [inner]; None: results are gated, and not normalised


class StateSpace:
    """Projected rows (gates, inputs, b, c, dt) -> [tokens, inner]. See StateMixer."""

    def __init__(
        self,
        sizes: SpaceSizes,
        weights: SpaceWeights,
        *,
        eps: float,
        dt_limits: tuple[float, float],
        gates_first: bool = True,
    ) -> None:
        """`eps`: of the norm, of each group's results by itself. `gates_first`: they are gated before the norm."""
        self._sizes, self._weights = sizes, weights
        self._decay = -weights.log_decay.exp()
        self._limits = dt_limits
        self._gated = GatedRows(sizes.inner, weights.norm, GatedForm(sizes.num_groups, eps, gates_first))

    def __call__(self, projected: Tensor, rows: StateRows | DeviceStateRows, state: Sequence[Tensor]) -> Tensor:
        """The state has the rows before the convolution, and [blocks, heads, state_size, head_dim]."""
        sizes, weights, (tails, spaces) = self._sizes, self._weights, state
        inner, shared = sizes.inner, sizes.shared
        gates, convolved, dt = projected.split_with_sizes((inner, inner + 2 * shared, sizes.num_heads), dim=1)
        mixed = causal_convolution(convolved, weights.convolution, weights.convolution_bias, rows, tails)
        x, b, c = mixed.split_with_sizes((inner, shared, shared), dim=1)
        dt = functional.softplus(dt.double() + weights.dt_bias).clamp(*self._limits)
        decay = (dt * self._decay).exp().float()
        out = scan((x, b, c), (dt.float(), decay), weights.skip, rows, spaces)
        return self._gated(out.view(-1, inner), gates, rows)


def scan(
    rows: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    skip: Tensor,
    sequences: StateRows | DeviceStateRows,
    states: Tensor,
) -> Tensor:
    """Run all tokens through their states -> [tokens, heads, head_dim].

    rows    x [tokens, heads * head_dim], b and c [tokens, groups * state_size], parts of the same rows
    gates   dt and decay [tokens, heads]
    skip    [heads]
    states  [blocks, heads, state_size, head_dim], those of `sequences` written"""
    if isinstance(sequences, DeviceStateRows):
        scanned: Tensor = sequences.kernels.scans.scan_space(rows, gates, skip, sequences, states)
        return scanned
    x, b, c = rows
    level = scan_level(x, states)
    num_heads, state_size, head_dim = states.shape[1:]
    if level is not None and suits_space(head_dim):
        return scan_space(rows, gates, skip, sequences, states, level=level)
    dt, decay = gates
    x = x.reshape(-1, num_heads, head_dim)
    b, c = (each.reshape(len(x), -1, state_size) for each in (b, c))
    b, c = (each.repeat_interleave(num_heads // each.shape[1], dim=1) for each in (b, c))
    steps = x * dt[:, :, None]

    def step(state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        state = state * decay[tokens][:, :, None, None] + b[tokens][..., None] * steps[tokens][:, :, None]
        return state, (state * c[tokens][..., None]).sum(dim=2) + x[tokens] * skip[:, None]

    out = torch.empty_like(x)
    run_steps(sequences, states, step, out)
    return out
