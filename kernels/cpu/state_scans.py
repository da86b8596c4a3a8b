"""Recurrent states, token by token, and what is done with rows before and behind them, by the native kernels.

The plain forms beside each of them are in `kernels.states`. All tensors are on the CPU; states, and what has no other
dtype here, are float32."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu.native import load_native, vector_levels
from kernels.states.state_rows import StateRows

_native = load_native("convolve")
_LANES = 16  # floats that the widest level computes at a time
_ELEMENTS = (torch.float32, torch.bfloat16)


class GatedForm(NamedTuple):
    """How results are gated, and normalised group by group."""

    num_groups: int
    eps: float
    gates_first: bool  # before the norm


def scan_level(*tensors: Tensor) -> str | None:
    """Return the best level that runs here for these tensors; None: use plain PyTorch."""
    if _native is None or any(each.device.type != "cpu" or each.dtype != torch.float32 for each in tensors):
        return None
    levels = vector_levels()
    return levels[0] if levels else None


def suits_convolution(x: Tensor, weight: Tensor, tails: Tensor) -> bool:
    if _native is None or x.device.type != "cpu" or x.dtype not in _ELEMENTS or tails.dtype != x.dtype:
        return False
    taps, channels = weight.shape
    return channels % _LANES == 0 and 2 <= taps <= _native.most_taps


def suits_gates(gates: Tensor, num_groups: int) -> bool:
    if _native is None or gates.device.type != "cpu" or gates.dtype not in _ELEMENTS:
        return False
    return gates.shape[1] % (num_groups * _LANES) == 0


def suits_space(head_dim: int) -> bool:
    return head_dim % _LANES == 0


def suits_delta(key_dim: int, value_dim: int) -> bool:
    return _native is not None and not (key_dim % _LANES or value_dim % _LANES) and key_dim <= _native.most_state_keys


def scan_space(
    rows: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    skip: Tensor,
    sequences: StateRows,
    states: Tensor,
    *,
    level: str,
) -> Tensor:
    """Compute Mamba-2's recurrence -> [tokens, heads, head_dim]; see `kernels.states.state_space.scan`."""
    x, b, _ = rows
    num_heads, state_size, head_dim = states.shape[1:]
    out = torch.empty((len(x), num_heads, head_dim))
    sizes = (num_heads, head_dim, b.shape[1] // state_size, state_size)
    _native.scan_space(
        level,
        _addresses(rows, (num_heads * head_dim, b.shape[1], b.shape[1])),
        *(_contiguous(each, len(x), num_heads) for each in gates),
        skip.data_ptr(),
        out.data_ptr(),
        sizes,
        *_sequences(sequences),
        _memory(states),
        torch.get_num_threads(),
    )
    return out


def scan_delta(
    rows: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    sequences: StateRows,
    states: Tensor,
    *,
    level: str,
) -> Tensor:
    """Compute the gated delta rule -> [tokens, heads, value_dim]; see `kernels.states.delta_rule.scan`."""
    q, _, _ = rows
    num_heads, key_dim, value_dim = states.shape[1:]
    out = torch.empty((len(q), num_heads, value_dim))
    _native.scan_delta(
        level,
        _addresses(rows, (q.shape[1], q.shape[1], num_heads * value_dim)),
        *(_contiguous(each, len(q), num_heads) for each in gates),
        out.data_ptr(),
        (num_heads, value_dim, q.shape[1] // key_dim, key_dim),
        *_sequences(sequences),
        _memory(states),
        torch.get_num_threads(),
    )
    return out


def convolve(
    rows: tuple[Tensor, Tensor, Tensor] | tuple[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    sequences: StateRows,
    tails: Tensor,
    *,
    level: str,
) -> Tensor:
    """Compute `kernels.states.convolution.causal_convolution` of x, or of x, a gate and the gate behind, which are
    parts of the same rows [tokens, channels]."""
    x = rows[0]
    taps, channels = weight.shape
    assert all(each.shape == x.shape and each.dtype == x.dtype for each in rows), "rows of one kind"
    assert all(len(x) == 1 or each.stride() == (x.stride(0), 1) for each in rows), "rows of different lengths"
    assert x.shape[1] == channels, f"not [tokens, {channels}]: {x.shape}"
    assert tails.shape[1:] == (taps - 1, channels), f"not {taps - 1} rows: {tails.shape}"
    assert tails[0].is_contiguous(), "a state is one run of memory"
    assert weight.is_contiguous(), "taps apart"
    out = torch.empty(x.shape, dtype=x.dtype if len(rows) > 1 else torch.float32)
    addresses = [each.data_ptr() for each in rows]
    _native.convolve(
        level,
        (*addresses, *[0] * (3 - len(rows)), x.stride(0) * x.element_size()),
        (weight.data_ptr(), 0 if bias is None else bias.data_ptr(), taps),
        tails.data_ptr(),
        tails.stride(0) * tails.element_size(),
        out.data_ptr(),
        channels,
        x.dtype == torch.bfloat16,
        *_sequences(sequences),
        torch.get_num_threads(),
    )
    return out


def gate_rows_(x: Tensor, gates: Tensor, weight: Tensor | None, form: GatedForm, *, level: str) -> Tensor:
    """Compute `kernels.states.delta_rule.GatedRows`: x [rows, groups * width] contiguous, overwritten, and gates, whose
    rows may be apart -> [rows, groups * width], dtype of the gates."""
    assert x.shape == gates.shape, f"not a gate for each result: {gates.shape}"
    assert x.is_contiguous(), "rows apart"
    assert len(gates) == 1 or gates.stride(1) == 1, "gates apart"
    out = torch.empty(x.shape, dtype=gates.dtype)
    _native.gate_rows(
        level,
        x.data_ptr(),
        gates.data_ptr(),
        gates.stride(0) * gates.element_size(),
        0 if weight is None else weight.data_ptr(),
        out.data_ptr(),
        (len(x), form.num_groups, x.shape[1] // form.num_groups),
        form.eps,
        form.gates_first,
        gates.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def silu_(x: Tensor, level: str) -> None:
    """Compute x = x * sigmoid(x), contiguous, in place: the same of an element wherever it stands."""
    assert x.is_contiguous(), "rows apart"
    _native.silu_in_place(level, x.data_ptr(), x.numel(), torch.get_num_threads())


def _addresses(rows: tuple[Tensor, Tensor, Tensor], widths: tuple[int, int, int]) -> tuple[int, int, int, int]:
    first, second, third = rows
    stride = first.stride(0)
    for each, width in zip(rows, widths, strict=True):
        assert each.shape == (len(first), width), f"not [tokens, {width}]: {each.shape}"
        assert len(each) == 1 or each.stride() == (stride, 1), "rows of different lengths"
    return first.data_ptr(), second.data_ptr(), third.data_ptr(), stride


def _contiguous(gates: Tensor, num_tokens: int, num_heads: int) -> int:
    assert gates.shape == (num_tokens, num_heads), f"not a number for each head: {gates.shape}"
    assert gates.is_contiguous(), "rows apart"
    return gates.data_ptr()


def _sequences(rows: StateRows) -> tuple[tuple[int, ...], int]:
    arrays = (rows.firsts, rows.sources, rows.first_parts, rows.ends, rows.targets)
    assert all(each.flags.c_contiguous for each in arrays), "numbers apart"
    return tuple(each.ctypes.data for each in arrays), len(rows.firsts)


def _memory(states: Tensor) -> tuple[int, int, int]:
    assert states[0].is_contiguous(), "a state is one run of memory"
    return states.data_ptr(), states.stride(0) * states.element_size(), states.shape[2] * states.shape[3]
