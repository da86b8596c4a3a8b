"""Masks of tokens: native where it is built, and plain, against a loop over bits."""

import pytest
import torch

from kernels import sampling
from kernels.cpu import token_masks
from kernels.sampling import mask_tokens_


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab_size", [1, 7, 32, 33, 199, 1000])
def test_tokens_that_are_not_allowed_are_minus_infinity(
    vocab_size: int, dtype: torch.dtype, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr(token_masks, "_native", None)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(6, vocab_size, generator=generator).to(dtype)
    logits[4, 0] = float("nan")
    rows = torch.tensor([4, 0, 3])
    num_words = -(-vocab_size // 32)
    bits = torch.randint(-(1 << 31), 1 << 31, (3, num_words), generator=generator).to(torch.int32)
    bits[1] = 0
    expected = logits.clone()
    for place, row in enumerate(rows.tolist()):
        for token_id in range(vocab_size):
            if not (int(bits[place, token_id // 32]) >> (token_id % 32)) & 1:
                expected[row, token_id] = -float("inf")
    mask_tokens_(logits, rows, bits)
    assert torch.equal(logits.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.skipif(token_masks._native is None, reason="not built")
def test_what_is_not_of_the_logits_is_refused() -> None:
    logits, bits = torch.zeros(2, 40), torch.zeros((1, 2), dtype=torch.int32)
    for rows, words in ((torch.tensor([2]), bits), (torch.tensor([-1]), bits), (torch.tensor([0]), bits[:, :1])):
        with pytest.raises(AssertionError):
            sampling.mask_tokens_(logits, rows, words)
