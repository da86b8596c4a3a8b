"""Masks of tokens over rows of logits, by the native kernel where it is built; its plain form: kernels.sampling."""

import torch
from torch import Tensor

from kernels.cpu.native import load_native

_native = load_native("mask_tokens")
# Minus infinity, as the bits of each dtype.
_LOWEST = {torch.float32: 0xFF800000, torch.bfloat16: 0xFF80, torch.float16: 0xFC00}


def has_native_masks(logits: Tensor) -> bool:
    return _native is not None and logits.device.type == "cpu" and logits.dtype in _LOWEST


def mask_tokens_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "rows of logits are one run of memory"
    assert rows.dtype == torch.int64, "rows are int64"
    assert bits.dtype == torch.int32, "words are int32"
    assert bits.shape == (len(rows), -(-vocab_size // 32)), "a bit for every token of every masked row"
    assert rows.is_contiguous(), "rows are one run of memory"
    assert bits.is_contiguous(), "masks are one run of memory"
    assert not len(rows) or 0 <= int(rows.min()) <= int(rows.max()) < num_rows, "a row outside the logits"
    _native.mask_tokens(
        logits.data_ptr(),
        logits.stride(0),
        rows.data_ptr(),
        bits.data_ptr(),
        len(rows),
        vocab_size,
        _LOWEST[logits.dtype],
        logits.element_size(),
        torch.get_num_threads(),
    )
