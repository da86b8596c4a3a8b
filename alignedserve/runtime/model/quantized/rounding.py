"""Rounds matrices to 4 or 8 bits, in the forms that `alignedserve quantize` writes and checkpoints have.

A block of 32 weights has a scale of its own. That of the 4-bit forms is the one of several that loses least; in Q4_K
and Q4_1 it is, like the minimum, what fits the rounded weights best (least squares, larger weights counting more).
"""

import torch
from torch import Tensor

from alignedserve.runtime.model.quantized.layout import BLOCK, block_type
from kernels.weight_blocks.block_values import FLOATS_OF_4_BITS

_FLOATS = torch.from_numpy(FLOATS_OF_4_BITS)
_TRIES = 21  # scales for each block of Q4
_TINY = 1e-12


def _in_blocks(values: Tensor) -> Tensor:
    return values.float().reshape(len(values), -1, BLOCK)


def to_int8(values: Tensor) -> dict[str, Tensor]:
    """Round values [rows, width]: words of 4 bytes, each plus 128, and a float16 scale for every 32."""
    blocks = _in_blocks(values)
    scales = (blocks.abs().amax(-1) / 127.0).half()
    quants = (blocks / scales.float().clamp_min(_TINY)[..., None]).round_().clamp_(-128, 127)
    words = (quants + 128).to(torch.uint8).flatten(1).contiguous().view(torch.int32)
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(values.shape)}


def to_mxfp4(values: Tensor) -> dict[str, Tensor]:
    """Round values [rows, width]: bytes of two floats of 4 bits, and for every 32 of them a power of two.

    The power is the one by which the largest becomes 4 to 6, or twice it where that loses less.
    """
    blocks = _in_blocks(values)
    lowest = blocks.abs().amax(-1).clamp_min(2.0**-120).log2().floor().sub_(2.0)
    tries = [(lowest + more, _floats_of_4_bits(blocks, lowest + more)) for more in (0.0, 1.0)]
    errors = [(_of_4_bits(codes, powers) - blocks).square_().sum(-1) for powers, codes in tries]
    is_first = errors[0] <= errors[1]
    powers = torch.where(is_first, tries[0][0], tries[1][0])
    codes = torch.where(is_first[..., None], tries[0][1], tries[1][1]).flatten(1)
    return {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": (powers + 127).to(torch.uint8)}


def _floats_of_4_bits(blocks: Tensor, powers: Tensor) -> Tensor:
    magnitudes = _FLOATS[:8]  # the others are negative
    between = (magnitudes[1:] + magnitudes[:-1]) / 2
    scaled = blocks / powers.exp2()[..., None]
    return torch.bucketize(scaled.abs(), between).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3


def _of_4_bits(codes: Tensor, powers: Tensor) -> Tensor:
    return _FLOATS[codes.long()] * powers.exp2()[..., None]


def to_blocks(values: Tensor) -> dict[str, Tensor]:
    """Round values [rows, width] to blocks of `block_type`, as GGUF files have them: uint8 [rows, bytes of a row]."""
    blocks = _in_blocks(values)
    scales, minima = _best_scales(blocks)
    rows = _q4_k(blocks, scales, minima) if block_type(values.shape[1]) == "Q4_K" else _q4_1(blocks, scales, minima)
    return {"weight": rows}


def _best_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    weights = blocks.square().mean(-1, keepdim=True).sqrt_() + blocks.abs()
    low, high = blocks.amin(-1).clamp_(max=0.0), blocks.amax(-1).clamp_(min=0.0)
    span = (high - low).clamp_min_(_TINY)
    scales, minima = span / 15.0, low
    least = _loss(blocks, weights, scales, minima)
    for index in range(_TRIES):
        quants = ((blocks - low[..., None]) * ((14.0 + 0.1 * index) / span)[..., None]).round_().clamp_(0, 15)
        own_scales, own_minima = _fitted(blocks, weights, quants)
        loss = _loss(blocks, weights, own_scales, own_minima)
        is_better = (loss < least) & (own_scales > 0)
        least = torch.where(is_better, loss, least)
        scales = torch.where(is_better, own_scales, scales)
        minima = torch.where(is_better, own_minima, minima)
    return scales, minima


def _fitted(blocks: Tensor, weights: Tensor, quants: Tensor) -> tuple[Tensor, Tensor]:
    w, l, ll = weights.sum(-1), (weights * quants).sum(-1), (weights * quants.square()).sum(-1)  # noqa: E741
    x, lx = (weights * blocks).sum(-1), (weights * quants * blocks).sum(-1)
    determinant = (w * ll - l.square()).clamp_min_(_TINY)
    scales, minima = (w * lx - x * l) / determinant, (ll * x - l * lx) / determinant
    is_above = minima > 0
    return torch.where(is_above, lx / ll.clamp_min(_TINY), scales), minima.clamp_(max=0.0)


def _loss(blocks: Tensor, weights: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    quants = _quants(blocks, scales, minima)
    return (weights * (quants * scales[..., None] + minima[..., None] - blocks).square()).sum(-1)


def _quants(blocks: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    return ((blocks - minima[..., None]) / scales.clamp_min(_TINY)[..., None]).round_().clamp_(0, 15)


def _q4_1(blocks: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    heads = torch.stack((scales, minima), dim=-1).half()
    own_scales, own_minima = heads.float().unbind(-1)
    quants = _quants(blocks, own_scales, own_minima).to(torch.uint8)
    return torch.cat((heads.view(torch.uint8), _halves(quants)), dim=-1).flatten(1)


def _q4_k(blocks: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    parts = [own.reshape(len(own), -1, 8) for own in (scales, -minima)]  # [rows, superblocks, 8]
    heads = torch.stack([own.amax(-1) / 63.0 for own in parts], dim=-1).half()
    small = [
        (own / head.clamp_min(_TINY)[..., None]).round_().clamp_(0, 63).to(torch.uint8)
        for own, head in zip(parts, heads.float().unbind(-1), strict=True)
    ]
    own_scales, own_minima = (
        (own.float() * head[..., None]).flatten(1) for own, head in zip(small, heads.float().unbind(-1), strict=True)
    )
    quants = _quants(blocks, own_scales, -own_minima).to(torch.uint8).view(len(blocks), -1, 4, 2, BLOCK)
    words = (quants[..., 0, :] | quants[..., 1, :] << 4).flatten(-2)
    first, last = [own[..., :4] for own in small], [own[..., 4:] for own in small]
    sixes = [before | after >> 4 << 6 for before, after in zip(first, last, strict=True)]
    fours = (last[0] & 15) | (last[1] & 15) << 4
    return torch.cat((heads.view(torch.uint8), *sixes, fours, words), dim=-1).flatten(1)


def _halves(quants: Tensor) -> Tensor:
    return quants[..., :16] | quants[..., 16:] << 4
