"""Token sampling from logits on a GPU, each row by its own parameters, without sorting or the host.

Tokens are in order of their distance from the likeliest one, (highest logit - logit) / temperature, and of their ids
where it is equal. Every filter keeps the first so many of that order. Where it ends is found by search over the
distance's bits, which as an integer are in the order of the distances themselves: the row is summed up to three places
at once, and a quarter of the range remains.

Weights are exp(-distance) and summed as integers, in units of 2^-44 of the likeliest token's: sums are exact, so they
agree whatever order a GPU adds in, and a draw can only meet a token that is kept. A token less likely than the
likeliest by more than that is never drawn.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.sampling import RowParameters

_TILE = 4096  # tokens that are held at a time
_WARPS = 16
MOST_TOKENS = 1 << 18  # whose weights together fit an integer of 64 bits
_UNITS = tl.constexpr(float(1 << 44))  # of the likeliest token's weight
_LEAST_TEMPERATURE = tl.constexpr(1e-30)  # whose inverse is finite; near it only the likeliest have any weight
# Distances as integers: where a search begins, 2, 5 and 10, between which most filters end, and infinity.
_NEAR, _FAR, _FARTHER = tl.constexpr(0x40000000), tl.constexpr(0x40A00000), tl.constexpr(0x41200000)
_INFINITY_BITS = tl.constexpr(0x7F800000)


def sample_tokens(logits: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sample one token of each row -> its id [rows] int64, and whether the row is usable [rows] bool.

    logits       [rows, vocabulary] float32, bfloat16 or float16, rows possibly strided; left as they are
    parameters   the columns of RowParameters, on the same device

    A row at temperature 0 takes its likeliest token, the first of equals. Any other is drawn from softmax(logits /
    temperature) after the filters, in the order of `kernels.sampling.sample`: by the inverse of the cumulative
    distribution, in the order of token ids. Equal tokens at the edge of a filter are kept from the first on. A row that
    holds NaN or +inf, or nothing but -inf, is not usable; its token means nothing but lies within the vocabulary.
    """
    num_rows, vocabulary = logits.shape
    temperature, top_k, top_p, min_p, draws = RowParameters(*parameters)
    assert 0 < vocabulary <= MOST_TOKENS, f"a vocabulary of {vocabulary}"
    assert logits.stride(1) == 1 or vocabulary == 1, "not rows of contiguous logits"
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_usable = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        _sample[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            draws,
            token_ids,
            is_usable.view(torch.uint8),
            logits.stride(0),
            vocabulary,
            TILE=min(_TILE, triton.next_power_of_2(vocabulary)),
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
    """Return the distances of a tile's tokens from the likeliest, as floats and as integers."""
    columns, own = _logits(row, first, vocabulary, TILE)
    distance = (most - own) * scale
    return columns, distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _last_above(row, vocabulary, most, scale, min_p, TILE: tl.constexpr):
    """Return the largest distance, as an integer, of a token at least `min_p` times as likely as the likeliest."""
    last = tl.zeros((TILE,), tl.int32)
    for first in range(0, vocabulary, TILE):
        _, distance, key = _distances(row, first, vocabulary, most, scale, TILE)
        last = tl.maximum(last, tl.where(tl.exp(-distance) >= min_p, key, 0))
    return tl.max(last, axis=0)


@triton.jit
def _kept(
    row,
    first,
    vocabulary,
    most,
    scale,
    last_key,
    last_column,
    TILE: tl.constexpr,
    IS_COUNT: tl.constexpr,
):
    """Return the columns of a tile, their distances as integers, and their addends to a sum: 0 where not kept."""
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
def _cut(
    row,
    vocabulary,
    most,
    scale,
    last_key,
    last_column,
    target,
    TILE: tl.constexpr,
    IS_COUNT: tl.constexpr,
):
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
    """Return the first column of the highest logit, that logit, and whether all of the row is finite or -inf."""
    best = tl.full((TILE,), -float("inf"), tl.float32)
    at = tl.zeros((TILE,), tl.int32)
    is_wrong = tl.zeros((TILE,), tl.int32)
    for first in range(0, vocabulary, TILE):
        columns, own = _logits(row, first, vocabulary, TILE)
        is_wrong = is_wrong | ((own != own) | (own == float("inf"))).to(tl.int32)
        is_higher = own > best
        at = tl.where(is_higher, columns, at)
        best = tl.where(is_higher, own, best)
    most = tl.max(best, axis=0)
    column = tl.min(tl.where(best == most, at, vocabulary), axis=0)
    return column, most, tl.max(is_wrong, axis=0) == 0


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
    logits_stride,
    vocabulary,
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
        last_key = tl.full((), _INFINITY_BITS, tl.int32)
        last_column = tl.full((), 0, tl.int32) + vocabulary
        count = last_column.to(tl.int64)
        if min_p > 0.0:
            last_key = _last_above(row, vocabulary, most, scale, min_p, TILE)
            count = _total(row, vocabulary, most, scale, last_key, last_column, TILE, True)
        if (top_k > 0) & (top_k < vocabulary):
            target = tl.minimum(top_k, count)
            last_key, last_column, _ = _cut(row, vocabulary, most, scale, last_key, last_column, target, TILE, True)
        total = _total(row, vocabulary, most, scale, last_key, last_column, TILE, False)
        if top_p < 1.0:
            share = top_p.to(tl.float64) * total.to(tl.float64)
            target = tl.minimum(tl.maximum(tl.ceil(share).to(tl.int64), 1), total)
            last_key, last_column, total = _cut(
                row, vocabulary, most, scale, last_key, last_column, target, TILE, False
            )
        # The first token at which the sum exceeds a share of the total that is below it.
        target = tl.minimum((tl.load(draws + program) * total.to(tl.float64)).to(tl.int64), total - 1)
        passed, before = total * 0, total * 0
        start = last_column * 0
        for first in range(0, vocabulary, TILE):
            _, _, amount = _kept(row, first, vocabulary, most, scale, last_key, last_column, TILE, False)
            own = tl.sum(amount, axis=0)
            is_here = (passed <= target) & (target < passed + own)
            start = tl.where(is_here, first, start)
            before = tl.where(is_here, passed, before)
            passed += own
        columns, _, amount = _kept(row, start, vocabulary, most, scale, last_key, last_column, TILE, False)
        is_beyond = before + tl.cumsum(amount, axis=0) > target
        token = tl.min(tl.where(is_beyond, columns, vocabulary - 1), axis=0)
    tl.store(token_ids + program, token.to(tl.int64))
    tl.store(is_usable + program, is_number.to(tl.uint8))
