"""Layers with a state on a GPU: the recurrences of Mamba-2 and the gated delta rule, gates and norms behind them.

A program has a part of one head's state in registers and takes it through all tokens of a sequence, one after another:
a result does not depend on how a prompt was cut, as on a CPU (`kernels.states`, which has the formulas). Heads, parts
of heads and sequences are side by side; of a prompt that is alone they are few, and its tokens take their time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cpu.state_scans import GatedForm
from kernels.gpu.gating import silu
from kernels.gpu.launching import parts_of, power_of_two, row_warps
from kernels.states.state_rows import DeviceStateRows, one_token

# Elements of a state in one program, of a single warp, so that sums over keys stay within it: of many sequences, and of
# few, whose tokens come one after another (seen on an H200).
PART_ELEMENTS, _PART_OF_FEW = 4096, 2048
_FEW_SEQUENCES = 4


def scan_space(
    inputs: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    skip: Tensor,
    rows: DeviceStateRows,
    states: Tensor,
) -> Tensor:
    """Compute `kernels.states.state_space.scan`."""
    x, b, c = inputs
    num_heads, state_size, head_dim = states.shape[1:]
    out = torch.empty((len(x), num_heads, head_dim), dtype=torch.float32, device=x.device)
    padded_size = power_of_two(state_size)
    width = _part_width(rows, padded_size, head_dim)
    _scan_space[(parts_of(head_dim, width), num_heads, len(rows.firsts))](
        x,
        b,
        c,
        *(each.contiguous() for each in gates),
        skip,
        states,
        out,
        *_sequences(rows),
        x.stride(0),
        b.stride(0),
        c.stride(0),
        states.stride(0),
        NUM_HEADS=num_heads,
        HEADS_OF_GROUP=num_heads // (b.shape[1] // state_size),
        STATE_SIZE=state_size,
        PADDED_SIZE=padded_size,
        HEAD_DIM=head_dim,
        WIDTH=width,
        num_warps=1,
    )
    return out


def scan_delta(
    inputs: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    rows: DeviceStateRows,
    states: Tensor,
    *,
    eps: float,
) -> Tensor:
    """Compute `kernels.states.delta_rule.scan`. `eps`: of the lengths of q and k."""
    q, k, v = inputs
    num_heads, key_dim, value_dim = states.shape[1:]
    out = torch.empty((len(q), num_heads, value_dim), dtype=torch.float32, device=q.device)
    padded_dim = power_of_two(key_dim)
    width = _part_width(rows, padded_dim, value_dim)
    _scan_delta[(parts_of(value_dim, width), num_heads, len(rows.firsts))](
        q,
        k,
        v,
        *(each.contiguous() for each in gates),
        states,
        out,
        *_sequences(rows),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        states.stride(0),
        key_dim**-0.5,
        eps,
        NUM_HEADS=num_heads,
        HEADS_OF_KEY=num_heads // (q.shape[1] // key_dim),
        KEY_DIM=key_dim,
        PADDED_DIM=padded_dim,
        VALUE_DIM=value_dim,
        WIDTH=width,
        num_warps=1,
    )
    return out


def gate_rows(x: Tensor, gates: Tensor, weight: Tensor | None, form: GatedForm) -> Tensor:
    """Compute `kernels.states.delta_rule.GatedRows` of x [tokens, groups * width], contiguous."""
    num_tokens, width = x.shape[0], x.shape[1] // form.num_groups
    out = torch.empty(x.shape, dtype=gates.dtype, device=x.device)
    columns = power_of_two(width)
    if num_tokens:
        _gate_rows[(num_tokens, form.num_groups)](
            x,
            gates,
            x if weight is None else weight,
            out,
            gates.stride(0),
            form.eps,
            WIDTH=width,
            COLUMNS=columns,
            HAS_NORM=weight is not None,
            GATES_FIRST=form.gates_first,
            num_warps=row_warps(columns),
        )
    return out


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch the scan of one token. Raises Triton's errors."""
    rows = one_token(device)
    x, states = torch.ones((1, 16), device=device), torch.zeros((1, 1, 16, 16), device=device)
    gates = torch.ones((1, 1), device=device)
    scan_delta((x, x, x), (gates, gates), rows, states, eps=1e-6)


def _part_width(rows: DeviceStateRows, padded_size: int, width: int) -> int:
    most = PART_ELEMENTS if len(rows.firsts) >= _FEW_SEQUENCES else min(PART_ELEMENTS, _PART_OF_FEW)
    return max(1, min(most // padded_size, power_of_two(width)))


def _sequences(rows: DeviceStateRows) -> tuple[Tensor, ...]:
    return rows.firsts, rows.first_parts, rows.ends, rows.sources, rows.targets


@triton.jit
def _begin_of(part, first_part, first, ends):
    """Return the first token row of a part of a sequence. `first`: the sequence's own. It is read anew: of a scalar
    that one turn of a loop leaves for the bounds of the next one's inner loop, Triton 3.6 and 3.7 take the first value
    each time (decision 80)."""
    return tl.maximum(tl.load(ends + part - 1, mask=part > first_part, other=-1) + 1, first)


@triton.jit
def _scan_space(
    x,
    b,
    c,
    dts,
    decays,
    skip,
    states,
    out,
    firsts,
    first_parts,
    ends,
    sources,
    targets,
    x_stride,
    b_stride,
    c_stride,
    state_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_OF_GROUP: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head, sequence = tl.program_id(1), tl.program_id(2)
    columns, keys = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, PADDED_SIZE)
    is_column, is_key = columns < HEAD_DIM, keys < STATE_SIZE
    within = (head * STATE_SIZE + keys)[:, None] * HEAD_DIM + columns[None, :]
    is_element = is_key[:, None] & is_column[None, :]
    source, begin = tl.load(sources + sequence), tl.load(firsts + sequence)
    state = tl.load(states + source * state_stride + within, mask=is_element & (source >= 0), other=0.0)
    own_skip, group = tl.load(skip + head), head // HEADS_OF_GROUP
    first_part = tl.load(first_parts + sequence)
    for part in range(first_part, tl.load(first_parts + sequence + 1)):
        end = tl.load(ends + part)
        for at in range(_begin_of(part, first_part, begin, ends), end + 1):
            inputs = tl.load(x + at * x_stride + head * HEAD_DIM + columns, mask=is_column, other=0.0)
            written = tl.load(b + at * b_stride + group * STATE_SIZE + keys, mask=is_key, other=0.0)
            read = tl.load(c + at * c_stride + group * STATE_SIZE + keys, mask=is_key, other=0.0)
            dt, decay = tl.load(dts + at * NUM_HEADS + head), tl.load(decays + at * NUM_HEADS + head)
            state = state * decay + written[:, None] * (inputs * dt)[None, :]
            result = tl.sum(state * read[:, None], axis=0) + inputs * own_skip
            tl.store(out + (at * NUM_HEADS + head) * HEAD_DIM + columns, result, mask=is_column)
        tl.store(states + tl.load(targets + part) * state_stride + within, state, mask=is_element)


@triton.jit
def _scan_delta(
    q,
    k,
    v,
    betas,
    decays,
    states,
    out,
    firsts,
    first_parts,
    ends,
    sources,
    targets,
    q_stride,
    k_stride,
    v_stride,
    state_stride,
    scale,
    eps,
    NUM_HEADS: tl.constexpr,
    HEADS_OF_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    head, sequence = tl.program_id(1), tl.program_id(2)
    columns, dims = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, PADDED_DIM)
    is_column, is_dim = columns < VALUE_DIM, dims < KEY_DIM
    within = (head * KEY_DIM + dims)[:, None] * VALUE_DIM + columns[None, :]
    is_element = is_dim[:, None] & is_column[None, :]
    source, begin = tl.load(sources + sequence), tl.load(firsts + sequence)
    state = tl.load(states + source * state_stride + within, mask=is_element & (source >= 0), other=0.0)
    key_at = head // HEADS_OF_KEY * KEY_DIM + dims
    first_part = tl.load(first_parts + sequence)
    for part in range(first_part, tl.load(first_parts + sequence + 1)):
        end = tl.load(ends + part)
        for at in range(_begin_of(part, first_part, begin, ends), end + 1):
            query = tl.load(q + at * q_stride + key_at, mask=is_dim, other=0.0)
            key = tl.load(k + at * k_stride + key_at, mask=is_dim, other=0.0)
            value = tl.load(v + at * v_stride + head * VALUE_DIM + columns, mask=is_column, other=0.0)
            beta, decay = tl.load(betas + at * NUM_HEADS + head), tl.load(decays + at * NUM_HEADS + head)
            query = query * (scale / tl.sqrt(tl.sum(query * query, axis=0) + eps))
            key = key / tl.sqrt(tl.sum(key * key, axis=0) + eps)
            state = state * decay
            change = (value - tl.sum(state * key[:, None], axis=0)) * beta
            state += key[:, None] * change[None, :]
            result = tl.sum(state * query[:, None], axis=0)
            tl.store(out + (at * NUM_HEADS + head) * VALUE_DIM + columns, result, mask=is_column)
        tl.store(states + tl.load(targets + part) * state_stride + within, state, mask=is_element)


@triton.jit
def _gate_rows(
    x,
    gates,
    weight,
    out,
    gate_stride,
    eps,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATES_FIRST: tl.constexpr,
):
    row, group, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, COLUMNS)
    is_there, at = columns < WIDTH, group * WIDTH + columns
    width = tl.num_programs(1) * WIDTH
    inputs = tl.load(x + row * width + at, mask=is_there, other=0.0)
    factors = silu(tl.load(gates + row * gate_stride + at, mask=is_there, other=0.0).to(tl.float32))
    if GATES_FIRST or not HAS_NORM:
        inputs *= factors
    if HAS_NORM:
        inputs = inputs / tl.sqrt(tl.sum(inputs * inputs, axis=0) / WIDTH + eps)
        inputs *= tl.load(weight + at, mask=is_there, other=0.0)
        if not GATES_FIRST:
            inputs *= factors
    tl.store(out + row * width + at, inputs.to(out.dtype.element_ty), mask=is_there)
