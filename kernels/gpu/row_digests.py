"""Digests of rows on a GPU (`kernels.block_digests`): every word is read from memory once.

The rounds of a row are summed side by side, and their sums then mixed one after the other, all rows side by side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.block_digests import LANES, PRIME32_1, ROUND_WORDS, STRIPES, first_sums, secret_words

_ROUNDS = 8  # that one program sums

_LANES, _STRIPES, _ROUND_WORDS = tl.constexpr(LANES), tl.constexpr(STRIPES), tl.constexpr(ROUND_WORDS)
_PRIME = tl.constexpr(PRIME32_1)


def stripe_sums(words: Tensor, num_rounds: int, num_stripes: int, row_ids: Tensor | None = None) -> Tensor:
    """Sum the first `num_stripes` stripes of words int64 [count, width] -> int64 [count, 8].

    `row_ids` int64 [count]: of these rows of words alone.
    """
    width = words.shape[1]
    count = len(words) if row_ids is None else len(row_ids)
    sums = torch.empty((count, num_rounds + 1, LANES), dtype=torch.int64, device=words.device)
    out = torch.empty((count, LANES), dtype=torch.int64, device=words.device)
    if count:
        keys = secret_words(words.device)
        grid = (count, triton.cdiv(num_rounds + 1, _ROUNDS))
        ids, is_listed = (words, False) if row_ids is None else (row_ids, True)
        _sum_rounds[grid](
            words, ids, keys, sums, width, num_rounds + 1, num_stripes * LANES, IS_LISTED=is_listed, ROUNDS=_ROUNDS
        )
        _mix_rounds[(count,)](sums, keys, first_sums(words.device), out, num_rounds)
    return out


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch each kernel on a row of two rounds. Raises its errors."""
    words = torch.zeros((1, 2 * ROUND_WORDS), dtype=torch.int64, device=device)
    stripe_sums(words, 1, 2 * STRIPES - 1)
    stripe_sums(words, 1, 2 * STRIPES - 1, words[0, :1])


@triton.jit
def _sum_rounds(words, row_ids, keys, sums, width, num_sums, num_words, IS_LISTED: tl.constexpr, ROUNDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if IS_LISTED:
        source = tl.load(row_ids + row)
    first = tl.program_id(1) * ROUNDS
    rounds = first + tl.arange(0, ROUNDS)[:, None, None]
    stripes = tl.arange(0, _STRIPES)[None, :, None]
    lanes = tl.arange(0, _LANES)[None, None, :]
    begin = rounds * _ROUND_WORDS + stripes * _LANES
    is_word = begin + lanes < num_words
    own = tl.load(words + source * width + begin + lanes, mask=is_word, other=0).to(tl.uint64, bitcast=True)
    neighbour = tl.load(words + source * width + begin + (lanes ^ 1), mask=is_word, other=0)
    key = tl.load(keys + stripes + lanes).to(tl.uint64, bitcast=True)
    mixed = own ^ key
    products = ((mixed & 0xFFFFFFFF) * (mixed >> 32)).to(tl.int64, bitcast=True)
    totals = tl.sum(tl.where(is_word, products + neighbour, 0), axis=1)
    numbers = first + tl.arange(0, ROUNDS)[:, None]
    at = (row * num_sums + numbers) * _LANES + tl.arange(0, _LANES)[None, :]
    tl.store(sums + at, totals, mask=numbers < num_sums)


@triton.jit
def _mix_rounds(sums, keys, first, out, num_rounds):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, _LANES)
    key = tl.load(keys + _STRIPES + lanes).to(tl.uint64, bitcast=True)
    total = tl.load(first + lanes).to(tl.uint64, bitcast=True)
    begin = sums + row * (num_rounds + 1) * _LANES + lanes
    for number in range(num_rounds):
        total += tl.load(begin + number * _LANES).to(tl.uint64, bitcast=True)
        total = (total ^ (total >> 47) ^ key) * _PRIME
    total += tl.load(begin + num_rounds * _LANES).to(tl.uint64, bitcast=True)
    tl.store(out + row * _LANES + lanes, total.to(tl.int64, bitcast=True))
