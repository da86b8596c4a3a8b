"""Token sampling from logits. Rows are independent: the rest of the batch never changes a row's result."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cpu import token_masks
from kernels.cpu.rows import highest, native_level
from kernels.gpu_dispatch import fused_kernels

# Candidates that are sorted first; a row whose filters let more through is tried with the next number, then whole.
_CANDIDATES = (256, 4096)
# Wide rows are summed in spans of this many tokens first: one span is searched, not the whole row.
_SPAN = 512


class Filters(NamedTuple):
    """Per row; the neutral value of each lets every token through."""

    top_k: Tensor  # [rows] int64, 0: no limit
    top_p: Tensor  # [rows] float32, 1: no limit
    min_p: Tensor  # [rows] float32, 0: no limit


class SeenTokens(NamedTuple):
    """Tokens of prompts and outputs, each of a row once."""

    rows: Tensor  # [seen] int64: of the logits
    token_ids: Tensor  # [seen] int64
    counts: Tensor  # [seen] int32: times each was generated


class Penalties(NamedTuple):
    """Per row of the logits, float32; the neutral value of each changes nothing."""

    repetition: Tensor  # 1: none
    frequency: Tensor  # 0: none
    presence: Tensor  # 0: none


class RowParameters(NamedTuple):
    """Per row; the columns that a GPU's sampling takes, which draws for greedy and other rows alike."""

    temperatures: Tensor  # [rows] float32, 0: the likeliest token
    top_k: Tensor  # as Filters
    top_p: Tensor
    min_p: Tensor
    draws: Tensor  # [rows] float64 in [0, 1)


def uniforms(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position): a hash (splitmix64 twice), without any state."""
    with np.errstate(over="ignore"):
        mixed = _splitmix(seeds.astype(np.uint64)) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = _splitmix(mixed)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Choose from logits [rows, vocabulary] of any dtype -> the likeliest token (the first of equals) [rows] int64, and
    whether the row is usable [rows] bool. A row that holds NaN or +inf, or nothing but -inf, is not usable: the maximum
    shows all three."""
    token_ids, most = _highest(logits)
    return token_ids, most.isfinite()


def _highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    level = native_level(logits.dtype, logits.device)
    if level is not None:
        return highest(logits, level=level)
    if logits.device.type != "cpu":
        token_ids = logits.argmax(dim=-1)
        return token_ids, logits.gather(1, token_ids[:, None]).squeeze(1)
    # numpy's runs eight times as fast as torch's: 0.2 ms for 64 rows of 50 272 (one thread, AVX-512).
    values = logits.float().numpy()
    columns = values.argmax(axis=-1)
    return torch.from_numpy(columns), torch.from_numpy(values[np.arange(len(columns)), columns])


def sample(logits: Tensor, filters: Filters, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits) after the filters. Filters apply in this order: min_p (probability at
    least min_p times the highest), top_k (the k likeliest), top_p (the fewest likeliest tokens that together hold top_p
    of what is left). `draws` [rows] float64 in [0, 1) picks by the inverse of the cumulative distribution. logits
    [rows, vocabulary] float32, already divided by the temperature. Returns token ids [rows] int64 and whether the row
    is usable [rows] bool (see `greedy`)."""
    token_ids, most = _highest(logits)
    is_usable = most.isfinite()
    is_filtered = (filters.top_k > 0) | (filters.top_p < 1.0) | (filters.min_p > 0.0)
    plain = (is_usable & ~is_filtered).nonzero().squeeze(1)
    if len(plain) == len(logits):
        return _draw((logits - most[:, None]).exp_(), draws), is_usable
    if len(plain):
        token_ids[plain] = _draw((logits[plain] - most[plain, None]).exp_(), draws[plain])
    remaining = (is_usable & is_filtered).nonzero().squeeze(1)
    for num_candidates in (*_CANDIDATES, logits.shape[1]):
        if not len(remaining):
            break
        own_filters = Filters(*(column[remaining] for column in filters))
        count = min(num_candidates, logits.shape[1])
        chosen, is_decided = _sample_filtered(logits[remaining], own_filters, draws[remaining], count)
        token_ids[remaining[is_decided]] = chosen[is_decided]
        remaining = remaining[~is_decided]
    return token_ids, is_usable


def _sample_filtered(logits: Tensor, filters: Filters, draws: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    vocabulary = logits.shape[1]
    top, token_ids = logits.topk(num_candidates, dim=-1)
    weights = (top - top[:, :1]).exp()
    ranks = torch.arange(num_candidates, device=logits.device)
    limits = torch.where(filters.top_k > 0, filters.top_k, vocabulary)
    is_kept = (ranks < limits[:, None]) & (weights >= filters.min_p[:, None])
    is_all = ~is_kept[:, -1] | (limits <= num_candidates)  # that min_p and top_k let through
    remaining = weights * is_kept
    everything = (logits - top[:, :1]).exp()
    everything = everything * (everything >= filters.min_p[:, None])
    total = torch.where(is_all, remaining.sum(-1), everything.sum(-1))
    before = remaining.cumsum(-1) - remaining
    is_kept &= (before < (filters.top_p * total)[:, None]) | (ranks == 0)
    # Where top_k ends behind the candidates, the total that top_p is of is not known.
    is_decided = is_all | (~is_kept[:, -1] & (limits >= vocabulary)) | (num_candidates == vocabulary)
    chosen = token_ids.gather(1, _draw(weights * is_kept, draws)[:, None]).squeeze(1)
    return chosen, is_decided


def _draw(weights: Tensor, draws: Tensor) -> Tensor:
    """Draw by weights [rows, width], not negative, not all 0; draws [rows] in [0, 1) -> index [rows] of a positive
    weight."""
    rows, width = weights.shape
    if width <= 2 * _SPAN:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative, draws * cumulative[:, -1])
    whole = width // _SPAN * _SPAN
    sums = weights[:, :whole].view(rows, -1, _SPAN).sum(-1, dtype=torch.float64)
    if whole < width:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], dim=-1)
    cumulative = sums.cumsum(-1)
    target = draws * cumulative[:, -1]
    span = _first_above(cumulative, target)[:, None]
    target = target - (cumulative - sums).gather(1, span).squeeze(1)
    columns = span * _SPAN + torch.arange(_SPAN, device=weights.device)
    inner = weights.gather(1, columns.clamp(max=width - 1)) * (columns < width)
    return span.squeeze(1) * _SPAN + _first_above(inner.cumsum(-1, dtype=torch.float64), target)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    # Rounding may have carried the target up to the sum itself, which nothing exceeds.
    target = torch.minimum(target, torch.nextafter(cumulative[:, -1], torch.zeros_like(target)))
    return torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)


def penalise_(logits: Tensor, seen: SeenTokens, penalties: Penalties) -> None:
    """Change logits [rows, vocabulary] float32 in place by the penalties. Repetition divides positive and multiplies
    negative logits of every token seen; frequency (times the count) and presence are subtracted for generated tokens,
    as OpenAI defines them."""
    logit = logits[seen.rows, seen.token_ids]
    repetition, frequency, presence = (column[seen.rows] for column in penalties)
    scaled = torch.where(logit > 0, logit / repetition, logit * repetition)
    logits[seen.rows, seen.token_ids] = scaled - frequency * seen.counts - presence * (seen.counts > 0)


def count_last(seen: SeenTokens, rows: Tensor, last: Tensor) -> SeenTokens:
    """Return what rows have seen with one more generated token each, in any order and some tokens twice. rows [counted]
    int64: which rows of the logits; last [all rows] int64: their tokens."""
    is_last = seen.token_ids == last[seen.rows]
    before = torch.zeros_like(last, dtype=seen.counts.dtype).index_add_(0, seen.rows, seen.counts * is_last)
    return SeenTokens(
        torch.cat((seen.rows, rows)),
        torch.cat((seen.token_ids, last[rows])),
        torch.cat((seen.counts + is_last, before[rows] + 1)),  # equal for a token that is there twice
    )


def mask_tokens_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place. logits [all rows, vocabulary] of any dtype; rows
    [masked] int64, all different; bits [masked, words] int32: bit i of word w is for token 32 w + i, 1: allowed."""
    if token_masks.has_native_masks(logits):
        token_masks.mask_tokens_(logits, rows, bits)
        return
    kernels = fused_kernels("allowed_tokens", logits.device, logits.dtype)
    if kernels is not None:
        kernels.mask_tokens_(logits, rows, bits)
        return
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    is_masked = (((bits[:, :, None] >> shifts) & 1) == 0).view(len(rows), -1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(is_masked, -float("inf"))


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities in the raw distribution. logits [rows, vocabulary] float32, token_ids [rows] int64 ->
    that token's log-probability [rows], and the `num_top` likeliest: values and ids [rows, num_top], likeliest
    first."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    values, ids = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return chosen, values, ids
