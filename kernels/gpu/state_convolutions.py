"""Convolutions of layers with a state on a GPU: of a few tokens, each channel by itself."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.gating import silu
from kernels.gpu.launching import parts_of, power_of_two
from kernels.states.state_rows import DeviceStateRows, one_token

_TOKENS, _CHANNELS = 16, 128  # of a program


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


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch the convolution of one token. Raises Triton's errors."""
    x, tails = torch.ones((1, 16), device=device), torch.zeros((1, 3, 16), device=device)
    convolve(x, torch.ones((4, 16), device=device), None, one_token(device), tails)


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
        inputs = tl.load(x + at[:, None] * x_stride + columns[None, :], mask=is_own, other=0.0)
        if HAS_GATES:
            gate = tl.load(before + at[:, None] * before_stride + columns[None, :], mask=is_own, other=0.0)
            inputs = (inputs.to(tl.float32) * gate.to(tl.float32)).to(inputs.dtype)
        is_kept = (is_token & (at < first) & (source >= 0))[:, None] & is_channel[None, :]
        kept_at = source * tail_stride + (at - first + TAPS - 1) * channels
        tail = tl.load(tails + kept_at[:, None] + columns[None, :], mask=is_kept, other=0.0)
        read = tl.where(is_kept, tail.to(tl.float32), inputs.to(tl.float32))
        result += read * tl.load(weight + tap * channels + columns, mask=is_channel, other=0.0)[None, :]
    where = is_token[:, None] & is_channel[None, :]
    if HAS_GATES:
        gate = tl.load(behind + tokens[:, None] * behind_stride + columns[None, :], mask=where, other=0.0)
        result = result.to(out.dtype.element_ty).to(tl.float32) * gate.to(tl.float32)
    else:
        result = silu(result)
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
            inputs = tl.load(x + at * x_stride + columns, mask=is_own, other=0.0)
            if HAS_GATES:
                gate = tl.load(before + at * before_stride + columns, mask=is_own, other=0.0)
                inputs = (inputs.to(tl.float32) * gate.to(tl.float32)).to(inputs.dtype)
            tail = tl.sum(tl.where((numbers == at - first + TAPS - 1)[:, None], old, 0.0), axis=0)
            left = tl.where(at >= first, inputs.to(tl.float32), tail)
            to = tails + target * tail_stride + number * channels + columns
            tl.store(to, left.to(tails.dtype.element_ty), mask=is_channel)
