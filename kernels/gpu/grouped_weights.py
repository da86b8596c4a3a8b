"""Products with weights of 4 or 8 bits in groups on a GPU: unpacked in registers, scaled group by group.

A program multiplies a tile of rows by a tile of outputs over a run of groups. Numbers less their zero points are small
integers, and floats of 4 and 8 bits are short: exact in any dtype of x; each group's sum is multiplied by its scale in
float32.
With few rows the inputs are cut into runs, whose results are added up afterwards, in order: there would be too few
programs to load the weight. With experts, a tile has rows of one expert, which the device itself has sorted."""

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.blocks import float8_values
from kernels.gpu.expert_rows import FEW_ROWS, ROWS, num_tiles, rows_of_tile, tile_rows
from kernels.gpu.launching import parts_of, power_of_two, upcast

_PROGRAMS = 256  # as many there should be
_RUN_GROUPS = 4  # of one program at least
_UNPACKED_COLUMNS = 32  # of one program that unpacks a group


class Tiling(NamedTuple):
    """The work of one program, and how it is launched."""

    rows: int
    columns: int  # outputs
    num_warps: int
    num_stages: int


# By the most rows of a product that each is for; the last one is for all others. From what compiled code and a GPU's
# rates say, not measured: up to 64 rows the weight is what takes time, and loads under way hide it; beyond, widening
# the numbers takes four times as long as multiplying 64 rows by them, so that more rows share it.
# `python -m benchmarks.gpu.parts products-sweep` measures them.
TILINGS: tuple[tuple[int, Tiling], ...] = (
    (16, Tiling(16, 64, 4, 4)),
    (32, Tiling(32, 64, 4, 4)),
    (64, Tiling(64, 64, 4, 3)),
    (1 << 62, Tiling(128, 64, 8, 3)),
)
_SORTED = {FEW_ROWS: Tiling(FEW_ROWS, 64, 4, 4), ROWS: Tiling(ROWS, 64, 4, 3)}


class GroupedOperand(Protocol):
    """A weight, or one of each expert in a further dimension in front."""

    words: Tensor  # uint8 [columns, in_width], of 4 bits half as many: group after group, its first half in lower bits
    scales: Tensor  # float32, or uint8: exponents or, with factors, FP8, [groups, columns]
    zeros: Tensor | None  # uint8 likewise; None: numbers are floats, or have minima
    minima: Tensor | None  # float32 likewise, added to what scales make of numbers from 0 on
    # float32 [columns], of all scales of a column, whose groups lie two and two as one does else; None: there are none
    factors: Tensor | None
    in_width: int


def tiling_of(num_rows: int) -> Tiling:
    return next(tiling for most_rows, tiling in TILINGS if num_rows <= most_rows)


def multiply(x: Tensor, weight: GroupedOperand, *, tiling: Tiling | None = None) -> Tensor:
    """Multiply x [rows, in_width], rows possibly strided, by a weight -> [rows, columns], dtype of x.

    `tiling`: in place of the one for so many rows."""
    num_rows, columns = len(x), weight.words.shape[0]
    num_groups = _num_groups(weight)
    tiling = tiling or tiling_of(num_rows)
    num_runs = 1
    if num_rows <= tiling.rows:
        num_runs = max(1, min(_PROGRAMS // parts_of(columns, tiling.columns), num_groups // _RUN_GROUPS))
    run_groups = parts_of(num_groups, num_runs)
    num_runs = parts_of(num_groups, run_groups)
    out = torch.empty((num_runs, num_rows, columns), dtype=torch.float32 if num_runs > 1 else x.dtype, device=x.device)
    grid = (parts_of(num_rows, tiling.rows), parts_of(columns, tiling.columns), num_runs)
    _launch(grid, x, weight, out, run_groups, tiling, None)
    return out[0] if num_runs == 1 else out.sum(0).to(x.dtype)


def unpack(weight: GroupedOperand, out: Tensor) -> None:
    """Write a weight's values, rounded once, to out [columns, in_width], contiguous."""
    num_groups, columns = _num_groups(weight), weight.words.shape[0]
    _unpack[(num_groups, parts_of(columns, _UNPACKED_COLUMNS))](
        *_stored(weight), out, columns, num_groups, COLUMNS=_UNPACKED_COLUMNS, **_form(weight)
    )


def multiply_sorted(x: Tensor, weight: GroupedOperand, ends: Tensor) -> Tensor:
    """Multiply x [rows, in_width], rows sorted by expert, each by its expert's weight -> [rows, columns]. `ends` int32
    [experts]: behind the last row of each."""
    num_experts, columns, _ = weight.words.shape
    out = torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
    tiling = _SORTED[tile_rows(len(x), num_experts)]
    grid = (num_tiles(len(x), num_experts), parts_of(columns, tiling.columns), 1)
    _launch(grid, x, weight, out, _num_groups(weight), tiling, ends)
    return out


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch once for each form of numbers on 64 inputs and outputs. Raises Triton's errors."""
    x, scales = torch.zeros((1, 64), dtype=dtype, device=device), torch.zeros((2, 64), device=device)
    zeros = scales.to(torch.uint8)
    factors = scales[0]
    forms = (
        _Trial(32, scales, zeros),
        _Trial(64, scales, zeros),
        _Trial(64, scales),
        _Trial(32, zeros),
        _Trial(32, torch.cat((zeros, zeros)), factors=factors),
        _Trial(32, scales, minima=scales),
        _Trial(64, scales, minima=scales),
        _Trial(64, torch.cat((scales, scales)), torch.cat((zeros, zeros))),
    )
    for weight in forms:
        multiply(x, weight)
        unpack(weight, x.new_empty((64, 64)))


class _Trial:
    in_width = 64

    def __init__(
        self,
        row_bytes: int,
        scales: Tensor,
        zeros: Tensor | None = None,
        factors: Tensor | None = None,
        minima: Tensor | None = None,
    ) -> None:
        self.words = torch.zeros((64, row_bytes), dtype=torch.uint8, device=scales.device)
        self.scales, self.zeros, self.factors, self.minima = scales, zeros, factors, minima


def _num_groups(weight: GroupedOperand) -> int:
    return weight.scales.shape[-2] // (1 if weight.factors is None else 2)


def _stored(weight: GroupedOperand) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    zeros = next((part for part in (weight.zeros, weight.minima) if part is not None), weight.scales)
    return weight.words, weight.scales, zeros, weight.scales if weight.factors is None else weight.factors


def _form(weight: GroupedOperand) -> dict[str, int]:
    return {
        "GROUP": weight.in_width // _num_groups(weight),
        "IN_HALVES": 2 * weight.words.shape[-1] == weight.in_width,
        "IS_FLOAT": weight.zeros is None and weight.minima is None,
        "HAS_MINIMA": weight.minima is not None,
        "IN_PAIRS": weight.factors is not None,
    }


def _launch(
    grid: tuple[int, int, int],
    x: Tensor,
    weight: GroupedOperand,
    out: Tensor,
    run_groups: int,
    tiling: Tiling,
    ends: Tensor | None,
) -> None:
    assert x.stride(1) == 1, "inputs of a row are one run of memory"
    _multiply[grid](
        x,
        *_stored(weight),
        out,
        x if ends is None else ends,
        len(x),
        0 if ends is None else len(ends),
        weight.words.shape[-2],
        _num_groups(weight),
        run_groups,
        x.stride(0),
        **_form(weight),
        EXPERTS=0 if ends is None else power_of_two(len(ends)),
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        UPCAST=upcast(x.dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton.jit(do_not_specialize=["num_rows", "num_experts", "run_groups"])
def _multiply(
    x,
    words,
    scales,
    zeros,
    factors,
    out,
    ends,
    num_rows,
    num_experts,
    columns,
    num_groups,
    run_groups,
    x_stride,
    GROUP: tl.constexpr,
    IN_HALVES: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    loaded: tl.constexpr = GROUP // 2 if IN_HALVES else GROUP
    end = num_rows
    first = tl.program_id(0).to(tl.int64) * ROWS
    outputs = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    weight_row = outputs
    if EXPERTS > 0:
        expert, first, end = rows_of_tile(ends, tl.program_id(0), num_experts, ROWS, EXPERTS)
        if first >= end:
            return
        first = first.to(tl.int64)
        weight_row += expert * columns
        scales += expert * num_groups * columns * (2 if IN_PAIRS else 1)
        zeros += expert * num_groups * columns
        factors += expert * columns
    rows = first + tl.arange(0, ROWS)
    places = tl.arange(0, loaded)
    is_row, is_output = rows < end, outputs < columns
    own_words = words + weight_row[:, None] * num_groups * loaded + places[None, :]
    own_inputs = x + rows[:, None] * x_stride + places[None, :]
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = tl.program_id(2) * run_groups
    for group in range(begin, tl.minimum(begin + run_groups, num_groups)):
        stored = tl.load(own_words + group * loaded, mask=is_output[:, None], other=0)
        scale, other_scale = scales_of(scales, group, outputs, is_output, columns, IN_PAIRS)
        inputs = tl.load(own_inputs + group * GROUP, mask=is_row[:, None], other=0.0)
        if UPCAST:
            inputs = inputs.to(tl.float32)
        zero = 0
        if not IS_FLOAT and not HAS_MINIMA:
            zero = tl.load(zeros + group * columns + outputs, mask=is_output, other=0).to(tl.int32)[:, None]
        if HAS_MINIMA:
            minimum = tl.load(zeros + group * columns + outputs, mask=is_output, other=0.0)
            result += tl.sum(inputs.to(tl.float32), axis=1)[:, None] * minimum[None, :]
        if IN_HALVES:
            others = tl.load(own_inputs + group * GROUP + loaded, mask=is_row[:, None], other=0.0)
            if UPCAST:
                others = others.to(tl.float32)
            if HAS_MINIMA:
                result += tl.sum(others.to(tl.float32), axis=1)[:, None] * minimum[None, :]
            upper = small_numbers(stored >> 4, zero, inputs, IN_HALVES, IS_FLOAT)
            sums = tl.dot(others, tl.trans(upper), input_precision="ieee")
            if IN_PAIRS:
                result += sums * other_scale[None, :]
                sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            lower = small_numbers(stored & 15, zero, inputs, IN_HALVES, IS_FLOAT)
            sums = tl.dot(inputs, tl.trans(lower), sums, input_precision="ieee")
        else:
            numbers = small_numbers(stored, zero, inputs, IN_HALVES, IS_FLOAT)
            sums = tl.dot(inputs, tl.trans(numbers), input_precision="ieee")
        result += sums * scale[None, :]
    if IN_PAIRS:
        result *= tl.load(factors + outputs, mask=is_output, other=0.0)[None, :]
    at = (tl.program_id(2).to(tl.int64) * num_rows + rows)[:, None] * columns + outputs[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _unpack(
    words,
    scales,
    zeros,
    factors,
    out,
    columns,
    num_groups,
    GROUP: tl.constexpr,
    IN_HALVES: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    loaded: tl.constexpr = GROUP // 2 if IN_HALVES else GROUP
    group = tl.program_id(0)
    outputs = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    places = tl.arange(0, loaded)
    is_output = outputs < columns
    stored = tl.load(
        words + (outputs[:, None] * num_groups + group) * loaded + places[None, :], mask=is_output[:, None], other=0
    )
    scale, other_scale = scales_of(scales, group, outputs, is_output, columns, IN_PAIRS)
    if IN_PAIRS:
        factor = tl.load(factors + outputs, mask=is_output, other=0.0)
        scale, other_scale = scale * factor, other_scale * factor
    pointers = out + (outputs[:, None] * num_groups + group) * GROUP + places[None, :]
    zero, minimum = 0, 0.0
    if not IS_FLOAT and not HAS_MINIMA:
        zero = tl.load(zeros + group * columns + outputs, mask=is_output, other=0).to(tl.int32)[:, None]
    if HAS_MINIMA:
        minimum = tl.load(zeros + group * columns + outputs, mask=is_output, other=0.0)[:, None]
    if IN_HALVES:
        upper = small_numbers(stored >> 4, zero, scale, IN_HALVES, IS_FLOAT) * other_scale[:, None] + minimum
        tl.store(pointers + loaded, upper.to(out.dtype.element_ty), mask=is_output[:, None])
        stored = stored & 15
    values = small_numbers(stored, zero, scale, IN_HALVES, IS_FLOAT) * scale[:, None] + minimum
    tl.store(pointers, values.to(out.dtype.element_ty), mask=is_output[:, None])


@triton.jit
def scales_of(scales, group, outputs, is_output, columns, IN_PAIRS: tl.constexpr):
    if IN_PAIRS:
        lower = tl.load(scales + 2 * group * columns + outputs, mask=is_output, other=0)
        upper = tl.load(scales + (2 * group + 1) * columns + outputs, mask=is_output, other=0)
        wide = tl.zeros_like(outputs).to(tl.float32)
        return float8_values(lower, wide), float8_values(upper, wide)
    scale = scale_values(tl.load(scales + group * columns + outputs, mask=is_output, other=0))
    return scale, scale


@triton.jit
def small_numbers(stored, zero, like, IN_HALVES: tl.constexpr, IS_FLOAT: tl.constexpr):
    if not IS_FLOAT:
        return (stored.to(tl.int32) - zero).to(like.dtype)
    if IN_HALVES:
        return float4_values(stored, like)
    return float8_values(stored, like)


@triton.jit
def float4_values(stored, like):
    """Return floats of 4 bits (e2m1), one in the lower bits of each byte, as numbers of the dtype of `like`, exactly.
    Sign, exponent and mantissa are those of a float16 whose exponent counts from 2**-14 of theirs."""
    bits = stored.to(tl.uint16)
    halves = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True) * 16384.0
    return halves.to(tl.float32).to(like.dtype)


@triton.jit
def scale_values(scales):
    if scales.dtype != tl.uint8:
        return scales
    bits = tl.where(scales == 0, 0x400000, scales.to(tl.int32) << 23)  # the least is no normal number of float32
    return bits.to(tl.float32, bitcast=True)
