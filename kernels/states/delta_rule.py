"""The gated delta rule (Yang and others, 2024), as Qwen3-Next has it beside attention.

Of a head, with q and k of length 1: state = exp(g) state; state += k (beta (v - k^T state))^T; the result is q^T state.
So a key's value is replaced, not added to. Tokens pass one after another, as in `kernels.states.state_space`.

Recurrences in plain PyTorch: one token after another, those of all sequences of a pass together."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import RmsNorm
from kernels.cpu.state_scans import GatedForm, gate_rows_, scan_delta, scan_level, suits_delta, suits_gates
from kernels.states.convolution import causal_convolution, silu_in_place
from kernels.states.state_rows import NO_BLOCK, DeviceStateRows, StateRows

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

        `rows`: of the pass."""
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


_LENGTH_EPS = 1e-6


class DeltaSizes(NamedTuple):
    """The sizes of a layer's heads."""

    num_key_heads: int
    key_dim: int
    num_heads: int
    value_dim: int

    @property
    def keys(self) -> int:
        """Return the elements of all heads' keys."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Return the elements of all heads' values."""
        return self.num_heads * self.value_dim


class DeltaWeights(NamedTuple):
    """The weights between a layer's two products, float32."""

    convolution: Tensor  # [kernel_size, 2 * keys + values]
    log_decay: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    norm: Tensor  # [value_dim]


class DeltaRule:
    """Projected rows (q, k, v, gates, b, a) -> [tokens, values]. See StateMixer."""

    def __init__(self, sizes: DeltaSizes, weights: DeltaWeights, *, eps: float) -> None:
        """`eps`: of the norm of each head's results."""
        self._sizes, self._weights = sizes, weights
        self._decay = -weights.log_decay.exp()
        norm = weights.norm.repeat(sizes.num_heads)
        self._gated = GatedRows(sizes.values, norm, GatedForm(sizes.num_heads, eps, gates_first=False))

    def __call__(self, projected: Tensor, rows: StateRows | DeviceStateRows, state: Sequence[Tensor]) -> Tensor:
        """The state has the rows before the convolution, and [blocks, heads, key_dim, value_dim]."""
        sizes, weights, (tails, memories) = self._sizes, self._weights, state
        keys, values, num_heads = sizes.keys, sizes.values, sizes.num_heads
        convolved, gates, b, a = projected.split_with_sizes((2 * keys + values, values, num_heads, num_heads), dim=1)
        mixed = causal_convolution(convolved, weights.convolution, None, rows, tails)
        q, k, v = mixed.split_with_sizes((keys, keys, values), dim=1)
        beta = b.double().sigmoid().float()
        decay = (functional.softplus(a.double() + weights.dt_bias) * self._decay).exp().float()
        return self._gated(scan((q, k, v), (beta, decay), rows, memories).view(-1, values), gates, rows)


def scan(
    rows: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    sequences: StateRows | DeviceStateRows,
    states: Tensor,
) -> Tensor:
    """Run all tokens through their states -> [tokens, heads, value_dim].

    rows    q and k [tokens, key_heads * key_dim], v [tokens, heads * value_dim], parts of the same rows
    gates   beta and decay [tokens, heads]
    states  [blocks, heads, key_dim, value_dim], those of `sequences` written"""
    if isinstance(sequences, DeviceStateRows):
        scanned: Tensor = sequences.kernels.scans.scan_delta(rows, gates, sequences, states, eps=_LENGTH_EPS)
        return scanned
    q, k, v = rows
    num_heads, key_dim, value_dim = states.shape[1:]
    level = scan_level(q, states)
    if level is not None and suits_delta(key_dim, value_dim):
        return scan_delta(rows, gates, sequences, states, level=level)
    beta, decay = gates
    q, k = (_unit(each.reshape(len(q), -1, key_dim), num_heads) for each in (q, k))
    q = q / math.sqrt(key_dim)
    v = v.reshape(len(q), num_heads, value_dim)

    def step(state: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        state = state * decay[tokens][:, :, None, None]
        known = (state * k[tokens][..., None]).sum(dim=2)
        change = (v[tokens] - known) * beta[tokens][..., None]
        state = state + k[tokens][..., None] * change[:, :, None]
        return state, (state * q[tokens][..., None]).sum(dim=2)

    out = torch.empty_like(v)
    run_steps(sequences, states, step, out)
    return out


def _unit(heads: Tensor, num_heads: int) -> Tensor:
    unit = heads * torch.rsqrt((heads * heads).sum(dim=-1, keepdim=True) + _LENGTH_EPS)
    return unit.repeat_interleave(num_heads // heads.shape[1], dim=1)
