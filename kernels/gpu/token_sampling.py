"""Token sampling from logits on a GPU, each row by its own parameters, without sorting or the host.

Tokens are in order of their distance from the likeliest one, (highest logit - logit) / temperature, and of their ids
where it is equal. Every filter keeps the first so many of that order. Where it ends is found by search over the
distance's bits, which as an integer are in the order of the distances themselves: the row is summed up to three places
at once, and a quarter of the range remains.

A row is read three times: for its likeliest token; for the sums up to a few distances; and to put those tokens aside
that can be kept, by the sums, in their order. The search is among these, unless they are very many.

Weights are exp(-distance) and summed as integers, in units of 2^-44 of the likeliest token's: sums are exact, so they
agree whatever order a GPU adds in, and a draw can only meet a token that is kept. A token less likely than the
likeliest by more than that is never drawn."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching import power_of_two
from kernels.sampling import RowParameters

_TILE = 2048  # tokens that are held at a time
_WARPS = 8
_CANDIDATES = 16384  # that are put aside for a row at most
MOST_TOKENS = (1 << 19) - 1  # whose weights together fit an integer of 64 bits
_UNITS = tl.constexpr(float(1 << 44))  # of the likeliest token's weight
_LEAST_TEMPERATURE = tl.constexpr(1e-30)  # whose inverse is finite; near it only the likeliest have any weight
# Distances as integers: where a search begins, 2, 5 and 10, between which most filters end, and infinity.
_NEAR, _FAR, _FARTHER = tl.constexpr(0x40000000), tl.constexpr(0x40A00000), tl.constexpr(0x41200000)
_INFINITY_BITS = tl.constexpr(0x7F800000)
# Up to which a row is summed first: 3, 6 and 10.
_FIRST_SUM, _SECOND_SUM, _THIRD_SUM = tl.constexpr(0x40400000), tl.constexpr(0x40C00000), tl.constexpr(0x41200000)


def sample_tokens(logits: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sample one token of each row -> its id [rows] int64, and whether the row is usable [rows] bool.

    logits       [rows, vocabulary] float32, bfloat16 or float16, rows possibly strided; left as they are
    parameters   the columns of RowParameters, on the same device

    A row at temperature 0 takes its likeliest token, the first of equals. Any other is drawn from softmax(logits /
    temperature) after the filters, in the order of `kernels.sampling.sample`, which draws the same tokens but for
    roundings: by the inverse of the cumulative distribution, in the order of token ids, and with filters from the
    likeliest token on. Equal tokens at the edge of a filter are kept from the first on. A row that holds NaN or +inf,
    or nothing but -inf, is not usable; its token means nothing but lies within the vocabulary."""
    num_rows, vocabulary = logits.shape
    temperature, top_k, top_p, min_p, draws = RowParameters(*parameters)
    assert 0 < vocabulary <= MOST_TOKENS, f"a vocabulary of {vocabulary}"
    assert logits.stride(1) == 1 or vocabulary == 1, "not rows of contiguous logits"
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_usable = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        aside = torch.empty((num_rows, min(vocabulary, _CANDIDATES)), dtype=logits.dtype, device=logits.device)
        _sample[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            draws,
            token_ids,
            is_usable.view(torch.uint8),
            aside,
            torch.empty_like(aside, dtype=torch.int32),
            logits.stride(0),
            vocabulary,
            aside.shape[1],
            TILE=min(_TILE, power_of_two(vocabulary)),
            num_warps=_WARPS,
        )
    return token_ids, is_usable


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch once on one tile, which compiles the kernel for all vocabularies; raises the errors of the launch."""
    temperature, draw = (torch.full((1,), 0.5, dtype=kind, device=device) for kind in (torch.float32, torch.float64))
    columns = RowParameters(
        temperature, torch.ones(1, dtype=torch.int64, device=device), temperature, temperature, draw
    )
    sample_tokens(torch.ones((1, _TILE), dtype=dtype, device=device), columns)


@triton.jit
def _logits(row, first, vocabulary, TILE: tl.constexpr):
    columns = first + tl.arange(0, TILE)
    return columns, tl.load(row + columns, mask=columns < vocabulary, other=-float("inf")).to(tl.float32)


@triton.jit
def _distances(row, first, vocabulary, most, scale, TILE: tl.constexpr):
    columns, row_logits = _logits(row, first, vocabulary, TILE)
    distance = (most - row_logits) * scale
    return columns, distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _last_above(row, vocabulary, most, scale, min_p, TILE: tl.constexpr):
    last = tl.zeros((TILE,), tl.int32)
    for first in range(0, vocabulary, TILE):
        _, distance, key = _distances(row, first, vocabulary, most, scale, TILE)
        last = tl.maximum(last, tl.where(tl.exp(-distance) >= min_p, key, 0))
    return tl.max(last, axis=0)


@triton.jit
def _kept(row, first, vocabulary, most, scale, last_key, last_column, TILE: tl.constexpr, IS_COUNT: tl.constexpr):
    columns, distance, key = _distances(row, first, vocabulary, most, scale, TILE)
    is_kept = (key < last_key) | ((key == last_key) & (columns <= last_column))
    is_kept = is_kept & (columns < vocabulary)
    if IS_COUNT:
        amount = is_kept.to(tl.int64)
    else:
        amount = tl.where(is_kept, (tl.exp(-distance) * _UNITS).to(tl.int64), 0)
    return columns, key, amount


@triton.jit
def _total(row, vocabulary, most, scale, last_key, last_column, TILE: tl.constexpr, IS_COUNT: tl.constexpr):
    total = tl.zeros((TILE,), tl.int64)
    for first in range(0, vocabulary, TILE):
        _, _, amount = _kept(row, first, vocabulary, most, scale, last_key, last_column, TILE, IS_COUNT)
        total += amount
    return tl.sum(total, axis=0)


@triton.jit
def _cut(row, vocabulary, most, scale, last_key, last_column, target, TILE: tl.constexpr, IS_COUNT: tl.constexpr):
    """Find the shortest prefix of the kept tokens whose sum reaches `target` (at least 1, at most the total); return
    distance and column of its last token, and its sum."""
    low, high = last_key * 0, last_key
    lower, middle, upper = low + _NEAR, low + _FAR, low + _FARTHER
    while low < high:
        up_to_lower = tl.zeros((TILE,), tl.int64)
        up_to_middle = tl.zeros((TILE,), tl.int64)
        up_to_upper = tl.zeros((TILE,), tl.int64)
        nearest = tl.full((TILE,), _INFINITY_BITS, tl.int32)
        farthest = tl.zeros((TILE,), tl.int32)
        for first in range(0, vocabulary, TILE):
            _, key, amount = _kept(row, first, vocabulary, most, scale, last_key, last_column, TILE, IS_COUNT)
            up_to_lower += tl.where(key <= lower, amount, 0)
            up_to_middle += tl.where(key <= middle, amount, 0)
            up_to_upper += tl.where(key <= upper, amount, 0)
            nearest = tl.minimum(nearest, tl.where(key >= low, key, _INFINITY_BITS))
            farthest = tl.maximum(farthest, tl.where(key <= high, key, 0))
        is_lower = tl.sum(up_to_lower, axis=0) >= target
        is_middle = tl.sum(up_to_middle, axis=0) >= target
        is_upper = tl.sum(up_to_upper, axis=0) >= target
        # The quarter that remains, and no more of it than from one token's distance to another's.
        low = tl.maximum(low, tl.min(nearest, axis=0))
        high = tl.minimum(high, tl.max(farthest, axis=0))
        above = tl.where(is_middle, lower, tl.where(is_upper, middle, upper))
        low = tl.where(is_lower, low, tl.maximum(low, above + 1))
        high = tl.where(is_upper, tl.minimum(high, tl.where(is_lower, lower, tl.where(is_middle, middle, upper))), high)
        middle = low + (high - low) // 2
        lower, upper = low + (middle - low) // 2, middle + (high - middle) // 2
    # Of the tokens at that distance, all of one weight, the first so many.
    nearer = tl.zeros((TILE,), tl.int64)
    each = tl.zeros((TILE,), tl.int64)
    for first in range(0, vocabulary, TILE):
        _, key, amount = _kept(row, first, vocabulary, most, scale, last_key, last_column, TILE, IS_COUNT)
        nearer += tl.where(key < low, amount, 0)
        each = tl.maximum(each, tl.where(key == low, amount, 0))
    weight = tl.max(each, axis=0)
    before = tl.sum(nearer, axis=0)
    needed = (target - before + weight - 1) // weight
    seen = needed * 0
    column = last_column * 0
    for first in range(0, vocabulary, TILE):
        columns, key, amount = _kept(row, first, vocabulary, most, scale, last_key, last_column, TILE, IS_COUNT)
        is_equal = ((key == low) & (amount > 0)).to(tl.int64)
        is_last = (is_equal > 0) & (seen + tl.cumsum(is_equal, axis=0) == needed)
        column = tl.maximum(column, tl.max(tl.where(is_last, columns, 0), axis=0))
        seen += tl.sum(is_equal, axis=0)
    return low, column, before + needed * weight


@triton.jit
def _likeliest(row, vocabulary, TILE: tl.constexpr):
    best = tl.full((TILE,), -float("inf"), tl.float32)
    at = tl.zeros((TILE,), tl.int32)
    is_wrong = tl.zeros((TILE,), tl.int32)
    for first in range(0, vocabulary, TILE):
        columns, row_logits = _logits(row, first, vocabulary, TILE)
        is_wrong = is_wrong | ((row_logits != row_logits) | (row_logits == float("inf"))).to(tl.int32)
        is_higher = row_logits > best
        at = tl.where(is_higher, columns, at)
        best = tl.where(is_higher, row_logits, best)
    most = tl.max(best, axis=0)
    column = tl.min(tl.where(best == most, at, vocabulary), axis=0)
    return column, most, tl.max(is_wrong, axis=0) == 0


@triton.jit
def _sums(row, vocabulary, most, scale, last_key, TILE: tl.constexpr):
    """Return the number and the weight of the tokens up to the first, the second and the third sum, and up to
    `last_key`."""
    first_count, first_weight = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int64)
    second_count, second_weight = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int64)
    third_count, third_weight = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int64)
    count, weight = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int64)
    for first in range(0, vocabulary, TILE):
        columns, distance, key = _distances(row, first, vocabulary, most, scale, TILE)
        is_kept = (key <= last_key) & (columns < vocabulary)
        amount = tl.where(is_kept, (tl.exp(-distance) * _UNITS).to(tl.int64), 0)
        count += is_kept.to(tl.int32)
        weight += amount
        first_count += (is_kept & (key <= _FIRST_SUM)).to(tl.int32)
        first_weight += tl.where(key <= _FIRST_SUM, amount, 0)
        second_count += (is_kept & (key <= _SECOND_SUM)).to(tl.int32)
        second_weight += tl.where(key <= _SECOND_SUM, amount, 0)
        third_count += (is_kept & (key <= _THIRD_SUM)).to(tl.int32)
        third_weight += tl.where(key <= _THIRD_SUM, amount, 0)
    return (
        (tl.sum(first_count, axis=0), tl.sum(first_weight, axis=0)),
        (tl.sum(second_count, axis=0), tl.sum(second_weight, axis=0)),
        (tl.sum(third_count, axis=0), tl.sum(third_weight, axis=0)),
        (tl.sum(count, axis=0), tl.sum(weight, axis=0)),
    )


@triton.jit
def _put_aside(row, vocabulary, most, scale, last_key, logits, ids, TILE: tl.constexpr):
    written = tl.full((), 0, tl.int32)
    for first in range(0, vocabulary, TILE):
        columns, row_logits = _logits(row, first, vocabulary, TILE)
        key = ((most - row_logits) * scale).to(tl.int32, bitcast=True)
        is_near = (key <= last_key) & (columns < vocabulary)
        at = written + tl.cumsum(is_near.to(tl.int32), axis=0) - 1
        tl.store(logits + at, row_logits.to(logits.dtype.element_ty), mask=is_near)
        tl.store(ids + at, columns, mask=is_near)
        written += tl.sum(is_near.to(tl.int32), axis=0)
    return written


@triton.jit
def _by_draw(row, vocabulary, most, scale, draw, TILE: tl.constexpr):
    last_key = tl.full((), _INFINITY_BITS, tl.int32)
    total = _total(row, vocabulary, most, scale, last_key, vocabulary, TILE, False)
    target = tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1)
    passed, before = total * 0, total * 0
    start = tl.full((), 0, tl.int32)
    for first in range(0, vocabulary, TILE):
        _, _, amount = _kept(row, first, vocabulary, most, scale, last_key, vocabulary, TILE, False)
        tile_sum = tl.sum(amount, axis=0)
        is_here = (passed <= target) & (target < passed + tile_sum)
        start = tl.where(is_here, first, start)
        before = tl.where(is_here, passed, before)
        passed += tile_sum
    columns, _, amount = _kept(row, start, vocabulary, most, scale, last_key, vocabulary, TILE, False)
    is_beyond = before + tl.cumsum(amount, axis=0) > target
    return tl.min(tl.where(is_beyond, columns, vocabulary - 1), axis=0)


@triton.jit
def _sample(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    draws,
    token_ids,
    is_usable,
    aside,
    aside_ids,
    logits_stride,
    vocabulary,
    most_aside,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    row = logits + program.to(tl.int64) * logits_stride
    token, most, is_number = _likeliest(row, vocabulary, TILE)
    is_number = is_number & (most > -float("inf"))
    temperature = tl.load(temperatures + program)
    if is_number & (temperature > 0.0):
        scale = 1.0 / tl.maximum(temperature, _LEAST_TEMPERATURE)
        top_k, top_p, min_p = tl.load(top_ks + program), tl.load(top_ps + program), tl.load(min_ps + program)
        draw = tl.load(draws + program)
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            last_key = tl.full((), _INFINITY_BITS, tl.int32)
            if min_p > 0.0:
                last_key = _last_above(row, vocabulary, most, scale, min_p, TILE)
            first, second, third, whole = _sums(row, vocabulary, most, scale, last_key, TILE)
            count, total = whole
            # What is kept lies within the first of the sums that reaches the first filter's end.
            is_counted = (top_k > 0) & (top_k < count)
            target = tl.where(is_counted, top_k, _share(top_p, total))
            is_cut = is_counted | (top_p < 1.0)
            in_first = is_cut & (tl.where(is_counted, first[0].to(tl.int64), first[1]) >= target)
            in_second = is_cut & (tl.where(is_counted, second[0].to(tl.int64), second[1]) >= target)
            in_third = is_cut & (tl.where(is_counted, third[0].to(tl.int64), third[1]) >= target)
            nearer = tl.where(in_first, _FIRST_SUM, tl.where(in_second, _SECOND_SUM, _THIRD_SUM))
            fewer = tl.where(in_first, first[0], tl.where(in_second, second[0], third[0]))
            width = tl.full((), 0, tl.int32) + vocabulary
            is_aside = tl.where(in_third, fewer, count) <= most_aside
            if is_aside:
                last_key = tl.where(in_third, tl.minimum(nearer, last_key), last_key)
                at = program.to(tl.int64) * most_aside
                width = _put_aside(row, vocabulary, most, scale, last_key, aside + at, aside_ids + at, TILE)
                tl.debug_barrier()
                row = aside + at
            last_column = width
            if is_counted:
                last_key, last_column, _ = _cut(row, width, most, scale, last_key, last_column, top_k, TILE, True)
                total = _total(row, width, most, scale, last_key, last_column, TILE, False)
            if top_p < 1.0:
                share = _share(top_p, total)
                last_key, last_column, total = _cut(row, width, most, scale, last_key, last_column, share, TILE, False)
            target = tl.minimum((draw * total.to(tl.float64)).to(tl.int64), total - 1) + 1
            _, token, _ = _cut(row, width, most, scale, last_key, last_column, target, TILE, False)
            if is_aside:
                token = tl.load(aside_ids + program.to(tl.int64) * most_aside + token)
        else:
            token = _by_draw(row, vocabulary, most, scale, draw, TILE)
    tl.store(token_ids + program, token.to(tl.int64))
    tl.store(is_usable + program, is_number.to(tl.uint8))


@triton.jit
def _share(top_p, total):
    share = tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(share, 1), total)
