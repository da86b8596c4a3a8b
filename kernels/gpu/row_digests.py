"""Digests of rows on a GPU (`kernels.cpu.row_digest`): a program for each part, which reads every word once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.block_digests import (
    LANES,
    LAST_MIX,
    LEAST_WORDS,
    PART_WORDS,
    PRIME32_1,
    PRIME64_1,
    ROUND_WORDS,
    STRIPES,
    constants,
    secret_words,
)
from kernels.cpu.row_digest import MIX, PLACE
from kernels.gpu.launching import parts_of

_LANES, _STRIPES, _ROUND_WORDS = tl.constexpr(LANES), tl.constexpr(STRIPES), tl.constexpr(ROUND_WORDS)
_ROUNDS, _PART_WORDS = tl.constexpr(PART_WORDS // ROUND_WORDS), tl.constexpr(PART_WORDS)
_LEAST_WORDS = tl.constexpr(LEAST_WORDS)
_PRIME32, _PRIME64, _LAST_MIX = tl.constexpr(PRIME32_1), tl.constexpr(PRIME64_1), tl.constexpr(LAST_MIX)
_PLACE, _MIX_1, _MIX_2 = tl.constexpr(PLACE), tl.constexpr(MIX[0]), tl.constexpr(MIX[1])


def row_digests(words: Tensor, row_ids: Tensor | None = None) -> Tensor:
    """Compute the digests of words int64 [count, width] -> int64 [count]. `row_ids` int64 [count]: of these rows of
    words alone."""
    width = words.shape[1]
    count = len(words) if row_ids is None else len(row_ids)
    num_parts = parts_of(width, PART_WORDS)
    terms = torch.empty((count, num_parts), dtype=torch.int64, device=words.device)
    if count:
        device = words.device
        ids, is_listed = (words, False) if row_ids is None else (row_ids, True)
        _sum_parts[(count, num_parts)](
            words, ids, secret_words(device), constants(device), terms, width, IS_LISTED=is_listed
        )
    return terms.sum(dim=1)


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch each kernel on a row of two rounds. Raises its errors."""
    words = torch.zeros((1, 2 * ROUND_WORDS), dtype=torch.int64, device=device)
    row_digests(words)
    row_digests(words, words[0, :1])


@triton.jit
def _sum_parts(words, row_ids, secret, constants, terms, width, IS_LISTED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    source = row
    if IS_LISTED:
        source = tl.load(row_ids + row)
    content = words + source * width + part.to(tl.int64) * _PART_WORDS
    num_there = tl.minimum(width - part * _PART_WORDS, _PART_WORDS)  # zeros follow those
    num_words = tl.maximum(num_there, _LEAST_WORDS)
    lanes = tl.arange(0, _LANES)

    # All rounds side by side, then the mixing of their sums.
    rounds = tl.arange(0, _ROUNDS)
    stripes = tl.arange(0, _STRIPES)[None, :, None]
    begins = rounds[:, None, None] * _ROUND_WORDS + stripes * _LANES
    loaded = _loaded(content, begins + lanes[None, None, :], num_there)
    neighbour = _loaded(content, begins + (lanes ^ 1)[None, None, :], num_there)
    added = _stripe_terms(loaded, neighbour, tl.load(secret + stripes + lanes[None, None, :]))
    is_before_last = begins + _LANES < num_words
    totals = tl.sum(tl.where(is_before_last, added, 0), axis=1)
    sums = tl.load(constants + lanes).to(tl.uint64, bitcast=True)
    key = tl.load(secret + _STRIPES + lanes).to(tl.uint64, bitcast=True)
    for number in range(_ROUNDS):
        own_total = tl.sum(tl.where((rounds == number)[:, None], totals, 0), axis=0)
        sums += own_total.to(tl.uint64, bitcast=True)
        mixed = (sums ^ (sums >> 47) ^ key) * _PRIME32
        sums = tl.where(num_words > (number + 1) * _ROUND_WORDS, mixed, sums)

    last = num_words - _LANES
    loaded = _loaded(content, last + lanes, num_there)
    neighbour = _loaded(content, last + (lanes ^ 1), num_there)
    sums += _stripe_terms(loaded, neighbour, tl.load(constants + _LANES + lanes)).to(tl.uint64, bitcast=True)
    sums ^= tl.load(constants + 2 * _LANES + lanes).to(tl.uint64, bitcast=True)

    result = num_words.to(tl.uint64) * 8 * _PRIME64
    for pair in range(_LANES // 2):
        a = tl.sum(tl.where(lanes == 2 * pair, sums.to(tl.int64, bitcast=True), 0), axis=0).to(tl.uint64, bitcast=True)
        b = tl.sum(tl.where(lanes == 2 * pair + 1, sums.to(tl.int64, bitcast=True), 0), axis=0).to(
            tl.uint64, bitcast=True
        )
        low, first, second = (
            (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF),
            (a & 0xFFFFFFFF) * (b >> 32),
            (a >> 32) * (b & 0xFFFFFFFF),
        )
        middle = (low >> 32) + (first & 0xFFFFFFFF) + (second & 0xFFFFFFFF)
        high = (a >> 32) * (b >> 32) + (first >> 32) + (second >> 32) + (middle >> 32)
        result += ((low & 0xFFFFFFFF) | (middle << 32)) ^ high
    result = (result ^ (result >> 37)) * _LAST_MIX
    result = result ^ (result >> 32)
    result = _mix(result ^ _mix((part + 1).to(tl.uint64) * _PLACE))
    tl.store(terms + row * tl.num_programs(1) + part, result.to(tl.int64, bitcast=True))


@triton.jit
def _loaded(content, at, num_there):
    return tl.load(content + at, mask=at < num_there, other=0)


@triton.jit
def _stripe_terms(terms, neighbour, key):
    mixed = (terms ^ key).to(tl.uint64, bitcast=True)
    return ((mixed & 0xFFFFFFFF) * (mixed >> 32)).to(tl.int64, bitcast=True) + neighbour


@triton.jit
def _mix(x):
    x = (x ^ (x >> 32)) * _MIX_1
    x = (x ^ (x >> 29)) * _MIX_2
    return x ^ (x >> 32)
