"""Causal convolutions of a few tokens, each channel by itself, before a recurrence or in place of one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.state_scans import convolve, scan_level, silu_, suits_convolution
from kernels.states.state_rows import DeviceStateRows, StateRows


class ConvolutionGates(NamedTuple):
    """What channels are multiplied by, [tokens, channels], parts of the same rows as these."""

    before: Tensor
    behind: Tensor


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: StateRows | DeviceStateRows,
    tails: Tensor,
    gates: ConvolutionGates | None = None,
) -> Tensor:
    """Convolve each channel with its last tokens: x [tokens, channels] -> silu of that, [tokens, channels] float32.

    weight  [kernel_size, channels] float32: the last row is a token's own
    bias    [channels] float32
    tails   [blocks, kernel_size - 1, channels]: what was convolved of the tokens before
    gates   then gates.before * x is convolved, and the result is gates.behind times that, both of the dtype of x"""
    if isinstance(rows, DeviceStateRows):
        convolved: Tensor = rows.kernels.convolutions.convolve(x, weight, bias, rows, tails, gates)
        return convolved
    level = scan_level(weight)
    if level is not None and suits_convolution(x, weight, tails):
        parts = (x,) if gates is None else (x, *gates)
        return convolve(parts, weight, bias, rows, tails, level=level)
    if gates is not None:
        return gates.behind * _convolved(gates.before * x, weight, bias, rows, tails).to(x.dtype)
    return silu_in_place(_convolved(x, weight, bias, rows, tails))


def silu_in_place(x: Tensor) -> Tensor:
    level = scan_level(x)
    if level is None:
        return functional.silu(x, inplace=True)
    silu_(x, level)
    return x


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, rows: StateRows, tails: Tensor) -> Tensor:
    places = rows.convolved(len(weight) - 1)
    extended = x.new_empty((places.num_rows, x.shape[1]))
    extended[places.own] = x
    extended[places.fresh] = 0
    extended[places.kept] = tails.index_select(0, places.sources).flatten(0, 1).to(x.dtype)
    # Tap by tap, in one order: what a row is does not depend on the others.
    out = extended.new_zeros(x.shape, dtype=torch.float32) if bias is None else bias.expand(x.shape).clone()
    for tap, factors in enumerate(weight):
        if places.is_one:
            read = extended[tap : tap + len(x)]
        else:
            read = extended.index_select(0, places.own - (places.num_before - tap))
        out += read.float() * factors
    left = extended.index_select(0, places.left).view(-1, *tails.shape[1:])
    tails.index_copy_(0, places.targets, left.to(tails.dtype))
    return out


class ShortConvolution:
    """Projected rows (gate, gate behind, inputs) [tokens, 3 * width] -> [tokens, width]. See StateMixer."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [kernel_size, width], `bias` [width]: float32."""
        self._weight, self._bias = weight, bias

    def __call__(self, projected: Tensor, rows: StateRows | DeviceStateRows, state: Sequence[Tensor]) -> Tensor:
        """The state has the rows before: [blocks, kernel_size - 1, width]."""
        gate, gate_behind, x = projected.chunk(3, dim=1)
        (tails,) = state
        return causal_convolution(x, self._weight, self._bias, rows, tails, ConvolutionGates(gate, gate_behind))
