"""Products of rows that lie sorted by expert with the experts' weights side by side, on a GPU.

For what `torch._grouped_mm` computes elsewhere: a program multiplies a tile of rows of one expert by a tile of outputs,
so that only the weights of experts with rows are read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.expert_rows import num_tiles, rows_of_tile, tile_rows
from kernels.gpu.launching import parts_of, power_of_two, upcast

_COLUMNS, _INPUTS = 64, 64  # of one program, and of one step of it
_MANY_COLUMNS = 128  # of one program whose tile has many rows
_STAGES = 4


def multiply_sorted(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply x [rows, in_width], sorted by expert, each by its expert's weight -> [rows, columns], dtype of x.

    weight   [experts, columns, in_width], contiguous
    ends     int32 [experts], behind the last row of each"""
    num_experts, columns, width = weight.shape
    assert x.stride(1) == 1, "inputs of a row are one run of memory"
    out = torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
    own_rows = tile_rows(len(x), num_experts)
    own_columns = _COLUMNS if own_rows < 64 else _MANY_COLUMNS
    _multiply_stacked[(num_tiles(len(x), num_experts), parts_of(columns, own_columns))](
        x,
        weight,
        ends,
        out,
        num_experts,
        columns,
        width,
        x.stride(0),
        ROWS=own_rows,
        COLUMNS=own_columns,
        INPUTS=_INPUTS,
        EXPERTS=power_of_two(num_experts),
        UPCAST=upcast(x.dtype),
        num_stages=_STAGES if x.element_size() < 4 else 2,
    )
    return out


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch once on two experts of 64 inputs and outputs. Raises Triton's errors."""
    ends = torch.ones(2, dtype=torch.int32, device=device)
    multiply_sorted(
        torch.zeros((1, 64), dtype=dtype, device=device), torch.zeros((2, 64, 64), dtype=dtype, device=device), ends
    )


@triton.jit
def _multiply_stacked(
    x,
    weight,
    ends,
    out,
    num_experts,
    columns,
    width,
    x_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    expert, first, end = rows_of_tile(ends, tl.program_id(0), num_experts, ROWS, EXPERTS)
    if first >= end:
        return
    rows = first.to(tl.int64) + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places = tl.arange(0, INPUTS)
    is_row, is_output = rows < end, outputs < columns
    own_inputs = x + rows[:, None] * x_stride + places[None, :]
    own_weights = weight + (expert * columns + outputs)[None, :] * width + places[:, None]
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, width, INPUTS):
        is_input = begin + places < width
        inputs = tl.load(own_inputs + begin, mask=is_row[:, None] & is_input[None, :], other=0.0)
        weights = tl.load(own_weights + begin, mask=is_output[None, :] & is_input[:, None], other=0.0)
        if UPCAST:
            inputs, weights = inputs.to(tl.float32), weights.to(tl.float32)
        result = tl.dot(inputs, weights, result, input_precision="ieee")
    at = rows[:, None] * columns + outputs[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
