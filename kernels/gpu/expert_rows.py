"""The experts of a pass on a GPU: chosen, their rows sorted, and their results added up, with nothing read by the host.

Rows lie sorted by expert: `ends` has for each expert the place behind its last row, and products cut the rows of each
into tiles, whose number the device alone knows; there are programs for as many as there could be."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching import parts_of, power_of_two

FEW_ROWS, ROWS = 16, 64  # of a tile of one expert
_CHOICES = 1024  # that a program sorts at a time, and more of many
_MANY_CHOICES = 4096
_COLUMNS = 1024  # of one program


def tile_rows(num_rows: int, num_experts: int) -> int:
    """Return the rows of a tile, where so many experts share so many sorted rows."""
    return FEW_ROWS if num_rows <= FEW_ROWS * num_experts else ROWS


def num_tiles(num_rows: int, num_experts: int) -> int:
    """Return how many tiles there could be: every expert's last one may be partly filled."""
    return min(num_experts, num_rows) + num_rows // tile_rows(num_rows, num_experts)


def choose(logits: Tensor, num_chosen: int, *, normalises: bool) -> tuple[Tensor, Tensor]:
    """Choose the experts of the highest logits of each row -> them, int32, and their shares, float32 [rows, chosen].

    logits       [rows, experts] float32, contiguous
    normalises   shares add up to 1; else they are those of the softmax over all experts

    Of equals the first. A row that holds NaN has experts, and shares that are NaN."""
    num_rows, num_experts = logits.shape
    experts = torch.empty((num_rows, num_chosen), dtype=torch.int32, device=logits.device)
    shares = torch.empty((num_rows, num_chosen), dtype=torch.float32, device=logits.device)
    if num_rows:
        padded = power_of_two(num_experts)
        _choose[(num_rows,)](
            logits,
            experts,
            shares,
            num_experts,
            num_chosen,
            NORMALISES=normalises,
            EXPERTS=padded,
            num_warps=max(1, min(padded // 64, 4)),
        )
    return experts, shares


def sort(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices `experts` [rows, chosen] int32, contiguous; equals stay in order. Returns for each sorted row
    its row in the pass, int32 [rows * chosen]; the place of each choice among the sorted rows, int32 [rows, chosen];
    and the places behind each expert's last row, int32 [experts]."""
    num_choices = experts.numel()
    rows = torch.empty(num_choices, dtype=torch.int32, device=experts.device)
    places = torch.empty_like(experts)
    ends = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    is_many = num_choices > _MANY_CHOICES
    _sort[(num_experts,)](
        experts,
        rows,
        places,
        ends,
        num_choices,
        experts.shape[1],
        CHOICES=_MANY_CHOICES if is_many else _CHOICES,
        num_warps=8 if is_many else 4,
    )
    return rows, places, ends


def add_up(results: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """Add up for each row the results [sorted rows, width], rows possibly strided, of its experts, times their shares.
    `places` int32 and `shares` float32 [rows, chosen] -> [rows, width], dtype of the results, rounded once."""
    num_rows, width = len(places), results.shape[1]
    out = torch.empty((num_rows, width), dtype=results.dtype, device=results.device)
    _add_up[(num_rows, parts_of(width, _COLUMNS))](
        results, places, shares, out, results.stride(0), width, places.shape[1], COLUMNS=_COLUMNS
    )
    return out


def add_biases(results: Tensor, biases: Tensor, ends: Tensor) -> None:
    """Add to results [sorted rows, width], contiguous, each the bias of its expert; in place. `biases` [experts,
    width], contiguous, dtype of the results; `ends`: see `sort`."""
    num_rows, width = results.shape
    if num_rows:
        num_experts = len(ends)
        _add_biases[(num_rows, parts_of(width, _COLUMNS))](
            results, biases, ends, width, num_experts, EXPERTS=power_of_two(num_experts), COLUMNS=_COLUMNS
        )


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch all once on one row of two experts. Raises Triton's errors."""
    experts, shares = choose(torch.zeros((1, 2), device=device), 2, normalises=True)
    _, places, _ = sort(experts, 2)
    results = torch.zeros((2, 16), dtype=dtype, device=device)
    add_biases(results, torch.zeros_like(results), torch.arange(1, 3, dtype=torch.int32, device=device))
    add_up(results, places, shares)


@triton.jit
def _choose(logits, experts, shares, num_experts, num_chosen, NORMALISES: tl.constexpr, EXPERTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, EXPERTS)
    is_there = columns < num_experts
    scores = tl.load(logits + row * num_experts + columns, mask=is_there, other=-float("inf"))
    weights = tl.exp(scores - tl.max(scores, axis=0))
    probabilities = weights / tl.sum(weights, axis=0)
    # Behind all probabilities, in this order: what is no number, what was chosen before, columns that are not there.
    ranks = tl.where(is_there, tl.where(probabilities >= 0.0, probabilities, -1.0), -3.0)
    total = tl.max(ranks, axis=0) * 0.0
    if NORMALISES:
        left = ranks
        for _ in range(num_chosen):
            expert = _best(left, columns, EXPERTS)
            total += tl.sum(tl.where(columns == expert, probabilities, 0.0), axis=0)
            left = tl.where(columns == expert, -2.0, left)
    else:
        total += 1.0
    for choice in range(num_chosen):
        expert = _best(ranks, columns, EXPERTS)
        share = tl.sum(tl.where(columns == expert, probabilities, 0.0), axis=0)
        ranks = tl.where(columns == expert, -2.0, ranks)
        tl.store(experts + row * num_chosen + choice, expert)
        tl.store(shares + row * num_chosen + choice, share / total)


@triton.jit
def _best(ranks, columns, EXPERTS: tl.constexpr):
    return tl.min(tl.where(ranks == tl.max(ranks, axis=0), columns, EXPERTS), axis=0)


@triton.jit(do_not_specialize=["num_choices", "num_chosen"])
def _sort(experts, rows, places, ends, num_choices, num_chosen, CHOICES: tl.constexpr):
    expert = tl.program_id(0)
    before = tl.zeros((CHOICES,), tl.int32)
    for first in range(0, num_choices, CHOICES):
        choices = first + tl.arange(0, CHOICES)
        chosen_experts = tl.load(experts + choices, mask=choices < num_choices, other=0x7FFFFFFF)
        before += (chosen_experts < expert).to(tl.int32)
    start = tl.sum(before, axis=0)
    for first in range(0, num_choices, CHOICES):
        choices = first + tl.arange(0, CHOICES)
        chosen_experts = tl.load(experts + choices, mask=choices < num_choices, other=0x7FFFFFFF)
        is_own = chosen_experts == expert
        at = start + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(rows + at, choices // num_chosen, mask=is_own)
        tl.store(places + choices, at, mask=is_own)
        start += tl.sum(is_own.to(tl.int32), axis=0)
    tl.store(ends + expert, start)


@triton.jit
def _add_up(results, places, shares, out, stride, width, num_chosen, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = columns < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(num_chosen):
        row_place = tl.load(places + row * num_chosen + choice).to(tl.int64)
        share = tl.load(shares + row * num_chosen + choice)
        total += share * tl.load(results + row_place * stride + columns, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _add_biases(results, biases, ends, width, num_experts, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    experts, columns = tl.arange(0, EXPERTS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_before = (experts < num_experts) & (tl.load(ends + experts, mask=experts < num_experts, other=0) <= row)
    expert = tl.sum(is_before.to(tl.int32), axis=0).to(tl.int64)
    outputs, is_there = results + row * width + columns, columns < width
    bias = tl.load(biases + expert * width + columns, mask=is_there, other=0.0).to(tl.float32)
    result = tl.load(outputs, mask=is_there, other=0.0).to(tl.float32) + bias
    tl.store(outputs, result.to(results.dtype.element_ty), mask=is_there)


@triton.jit
def rows_of_tile(ends, tile, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return a tile's expert, its first row and the row behind its expert's last one, up to the first: it has none."""
    experts = tl.arange(0, EXPERTS)
    is_there = experts < num_experts
    lasts = tl.load(ends + experts, mask=is_there, other=0)
    firsts = tl.load(ends + experts - 1, mask=is_there & (experts > 0), other=0)
    tiles = tl.where(is_there, (lasts - firsts + ROWS - 1) // ROWS, 0)
    tile_ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
    is_own = experts == expert
    within = tile - tl.sum(tl.where(is_own, tile_ends - tiles, 0), axis=0)
    first = tl.sum(tl.where(is_own, firsts, 0), axis=0) + within * ROWS
    return expert.to(tl.int64), first, tl.sum(tl.where(is_own, lasts, 0), axis=0)
