"""Masks of tokens on a GPU: logits of those that are not allowed become -inf, in one launch that reads no logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launching import parts_of

_TILE = 4096  # tokens of one program


def mask_tokens_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Mask in place; see kernels.sampling.mask_tokens_. Rows possibly strided; `bits` contiguous."""
    num_masked, vocabulary = len(rows), logits.shape[1]
    assert logits.stride(1) == 1 or vocabulary == 1, "not rows of contiguous logits"
    if num_masked:
        _mask[(num_masked, parts_of(vocabulary, _TILE))](
            logits, rows, bits, logits.stride(0), vocabulary, bits.shape[1], TILE=_TILE
        )


def trial_launch(device: torch.device, dtype: torch.dtype) -> None:
    """Launch once on one tile. Raises the errors of the launch."""
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    bits = torch.zeros((1, _TILE // 32), dtype=torch.int32, device=device)
    mask_tokens_(torch.zeros((1, _TILE), dtype=dtype, device=device), rows, bits)


@triton.jit
def _mask(logits, rows, bits, stride, vocabulary, words, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = columns < vocabulary
    word = tl.load(bits + program * words + columns // 32, mask=is_there, other=0)
    is_allowed = ((word >> (columns % 32)) & 1) == 1
    at = logits + tl.load(rows + program) * stride + columns
    tl.store(at, tl.full((TILE,), -float("inf"), tl.float32).to(logits.dtype.element_ty), mask=is_there & ~is_allowed)
