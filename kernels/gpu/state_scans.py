"""Layers with a state on a GPU: convolutions, the recurrences of Mamba-2 and the gated delta rule, gates and norms.

A program has a part of one head's state in registers and takes it through all tokens of a sequence, one after another:
a result does not depend on how a prompt was cut, as on a CPU (`kernels.states`, which has the formulas). Heads, parts
of heads and sequences are side by side; of a prompt that is alone they are few, and its tokens take their time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cpu.state_scans import GatedForm
from kernels.gpu.launching import parts_of, power_of_two, row_warps
from kernels.states.device_rows import DeviceStateRows

_TOKENS, _CHANNELS = 16, 128  # of a program that convolves
# Elements of a state in one program, of a single warp, so that sums over keys stay within it: of many sequences, and of
# few, whose tokens come one after another (seen on an H200).
PART_ELEMENTS, _PART_OF_FEW = 4096, 2048
_FEW_SEQUENCES = 4


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: DeviceStateRows,
    tails: Tensor,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute `kernels.states.convolution.causal_convolution`."""
    num_tokens, channels = x.shape
    taps = len(weight)
    assert x.stride(1) == 1, "channels of a token are one run of memory"
    before, behind = (x, x) if gates is None else gates
    out = torch.empty(x.shape, dtype=torch.float32 if gates is None else x.dtype, device=x.device)
    shared = (rows.firsts, rows.sources)
    sizes = {"TAPS": taps, "HAS_GATES": gates is not None, "CHANNELS": _CHANNELS}
    _convolve[(parts_of(num_tokens, _TOKENS), parts_of(channels, _CHANNELS))](
        x,
        before,
        behind,
        weight,
        weight if bias is None else bias,  # not read, but a pointer must be passed
        tails,
        out,
        *shared,
        rows.sequences,
        *(each.stride(0) for each in (x, before, behind, tails)),
        num_tokens,
        channels,
        **sizes,
        HAS_BIAS=bias is not None,
        TOKENS=_TOKENS,
    )
    _leave_tails[(len(rows.firsts), parts_of(channels, _CHANNELS))](
        x,
        before,
        tails,
        *shared,
        rows.first_parts,
        rows.ends,
        rows.targets,
        *(each.stride(0) for each in (x, before, tails)),
        channels,
        **sizes,
        PADDED_TAPS=power_of_two(taps),
    )
    return out


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
    """Compute `kernels.states.gated_rows.GatedRows` of x [tokens, groups * width], contiguous."""
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
    place = torch.zeros(1, dtype=torch.int64, device=device)
    rows = DeviceStateRows(
        None, place, torch.arange(2, device=device), place, place + 1, place, place[None], place[None]
    )
    x, states = torch.ones((1, 16), device=device), torch.zeros((1, 1, 16, 16), device=device)
    gates = torch.ones((1, 1), device=device)
    scan_delta((x, x, x), (gates, gates), rows, states, eps=1e-6)


def _part_width(rows: DeviceStateRows, padded_size: int, width: int) -> int:
    """Return how many of a state's columns, each of `padded_size` elements, a program has."""
    most = PART_ELEMENTS if len(rows.firsts) >= _FEW_SEQUENCES else min(PART_ELEMENTS, _PART_OF_FEW)
    return max(1, min(most // padded_size, power_of_two(width)))


def _sequences(rows: DeviceStateRows) -> tuple[Tensor, ...]:
    return rows.firsts, rows.first_parts, rows.ends, rows.sources, rows.targets


@triton.jit
def _silu(x):
    small = tl.exp(-tl.abs(x))
    return x * tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve(
    x,
    before,
    behind,
    weight,
    bias,
    tails,
    out,
    firsts,
    sources,
    sequences,
    x_stride,
    before_stride,
    behind_stride,
    tail_stride,
    num_tokens,
    channels,
    TAPS: tl.constexpr,
    HAS_GATES: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_token, is_channel = tokens < num_tokens, columns < channels
    sequence = tl.load(sequences + tokens, mask=is_token, other=0)
    first, source = tl.load(firsts + sequence), tl.load(sources + sequence)
    result = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=is_channel, other=0.0)[None, :]
    for tap in tl.static_range(TAPS):
        at = tokens - (TAPS - 1) + tap
        is_own = (is_token & (at >= first))[:, None] & is_channel[None, :]
        own = tl.load(x + at[:, None] * x_stride + columns[None, :], mask=is_own, other=0.0)
        if HAS_GATES:
            gate = tl.load(before + at[:, None] * before_stride + columns[None, :], mask=is_own, other=0.0)
            own = (own.to(tl.float32) * gate.to(tl.float32)).to(own.dtype)
        is_kept = (is_token & (at < first) & (source >= 0))[:, None] & is_channel[None, :]
        kept_at = source * tail_stride + (at - first + TAPS - 1) * channels
        kept = tl.load(tails + kept_at[:, None] + columns[None, :], mask=is_kept, other=0.0)
        read = tl.where(is_kept, kept.to(tl.float32), own.to(tl.float32))
        result += read * tl.load(weight + tap * channels + columns, mask=is_channel, other=0.0)[None, :]
    where = is_token[:, None] & is_channel[None, :]
    if HAS_GATES:
        gate = tl.load(behind + tokens[:, None] * behind_stride + columns[None, :], mask=where, other=0.0)
        result = result.to(out.dtype.element_ty).to(tl.float32) * gate.to(tl.float32)
    else:
        result = _silu(result)
    tl.store(out + tokens[:, None] * channels + columns[None, :], result.to(out.dtype.element_ty), mask=where)


@triton.jit
def _leave_tails(
    x,
    before,
    tails,
    firsts,
    sources,
    first_parts,
    ends,
    targets,
    x_stride,
    before_stride,
    tail_stride,
    channels,
    TAPS: tl.constexpr,
    HAS_GATES: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED_TAPS: tl.constexpr,
):
    """Leave the last rows before each part's end; all of the state before is read before any of it is written."""
    sequence = tl.program_id(0)
    columns = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = columns < channels
    first, source = tl.load(firsts + sequence), tl.load(sources + sequence)
    numbers = tl.arange(0, PADDED_TAPS)
    is_old = ((numbers < TAPS - 1) & (source >= 0))[:, None] & is_channel[None, :]
    old_at = source * tail_stride + numbers * channels
    old = tl.load(tails + old_at[:, None] + columns[None, :], mask=is_old, other=0.0).to(tl.float32)
    for part in range(tl.load(first_parts + sequence), tl.load(first_parts + sequence + 1)):
        end, target = tl.load(ends + part), tl.load(targets + part)
        for number in tl.static_range(TAPS - 1):
            at = end - (TAPS - 2) + number
            is_own = is_channel & (at >= first)
            own = tl.load(x + at * x_stride + columns, mask=is_own, other=0.0)
            if HAS_GATES:
                gate = tl.load(before + at * before_stride + columns, mask=is_own, other=0.0)
                own = (own.to(tl.float32) * gate.to(tl.float32)).to(own.dtype)
            kept = tl.sum(tl.where((numbers == at - first + TAPS - 1)[:, None], old, 0.0), axis=0)
            left = tl.where(at >= first, own.to(tl.float32), kept)
            to = tails + target * tail_stride + number * channels + columns
            tl.store(to, left.to(tails.dtype.element_ty), mask=is_channel)


@triton.jit
def _begin_of(part, first_part, first, ends):
    """Return the first token row of a part of a sequence. `first`: the sequence's own.

    It is read anew: of a scalar that one turn of a loop leaves for the bounds of the next one's inner loop, Triton 3.6
    and 3.7 take the first value each time (decision 80).
    """
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
            own = tl.load(x + at * x_stride + head * HEAD_DIM + columns, mask=is_column, other=0.0)
            written = tl.load(b + at * b_stride + group * STATE_SIZE + keys, mask=is_key, other=0.0)
            read = tl.load(c + at * c_stride + group * STATE_SIZE + keys, mask=is_key, other=0.0)
            dt, decay = tl.load(dts + at * NUM_HEADS + head), tl.load(decays + at * NUM_HEADS + head)
            state = state * decay + written[:, None] * (own * dt)[None, :]
            result = tl.sum(state * read[:, None], axis=0) + own * own_skip
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
    own = tl.load(x + row * width + at, mask=is_there, other=0.0)
    factors = _silu(tl.load(gates + row * gate_stride + at, mask=is_there, other=0.0).to(tl.float32))
    if GATES_FIRST or not HAS_NORM:
        own *= factors
    if HAS_NORM:
        own = own / tl.sqrt(tl.sum(own * own, axis=0) / WIDTH + eps)
        own *= tl.load(weight + at, mask=is_there, other=0.0)
        if not GATES_FIRST:
            own *= factors
    tl.store(out + row * width + at, own.to(out.dtype.element_ty), mask=is_there)
