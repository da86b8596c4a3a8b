"""Bidirectional attention of the native kernels: every token of a prompt reads all of it."""

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.native import supported_levels
from kernels.cpu.paged_attention import PagedAttention

levels = pytest.mark.parametrize("level", supported_levels() or [pytest.param("", marks=pytest.mark.skip("not built"))])
HEADS, HEAD_DIM, BLOCK_SIZE = 3, 24, 16
LENGTHS = (1, 5, 64, 130, 700)  # within a tile, of several tiles, of two sections


def reference(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute softmax attention of one prompt [tokens, heads, head_dim] in float64."""
    q, k, v = (part.double().transpose(0, 1) for part in (queries, keys, values))
    scores = q @ k.transpose(1, 2) / HEAD_DIM**0.5
    attended: Tensor = (scores.softmax(dim=-1) @ v).transpose(0, 1)
    return attended


class Prompts:
    """Random prompts in blocks, each beginning at a block of its own."""

    def __init__(self, lengths: tuple[int, ...], dtype: torch.dtype, level: str) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        width = -(-max(lengths) // BLOCK_SIZE)
        shape = (width * len(lengths), 1, 2, BLOCK_SIZE, HEADS, HEAD_DIM)
        self.lengths = np.array(lengths)
        self.blocks = torch.randn(shape, generator=generator).to(dtype)
        self.queries = torch.randn(sum(lengths), HEADS, 1, HEAD_DIM, generator=generator).to(dtype)
        self.table = np.arange(width * len(lengths)).reshape(len(lengths), width)
        self.attention = PagedAttention(self.blocks, group=1, level=level)

    def attend(self, num_threads: int) -> Tensor:
        out, rows = torch.empty_like(self.queries), np.arange(len(self.lengths))
        own = (self.table, rows, self.lengths, self.lengths, None, num_threads)
        plan = self.attention.plan_chunks(*own, is_bidirectional=True)
        self.attention.run(plan, self.queries, out, 0, is_windowed=False)
        return out

    def decode_as_last(self) -> Tensor:
        """Decode every query as if it were of the last token of its prompt, which reads the same."""
        out, rows = torch.empty_like(self.queries), np.repeat(np.arange(len(self.lengths)), self.lengths)
        plan = self.attention.plan_decode(self.table, rows, np.repeat(self.lengths, self.lengths), None, 1)
        self.attention.run(plan, self.queries, out, 0, is_windowed=False)
        return out

    def cached(self, prompt: int) -> tuple[Tensor, Tensor]:
        own = self.blocks[self.table[prompt], 0]
        keys, values = (own[:, part].reshape(-1, HEADS, HEAD_DIM)[: self.lengths[prompt]] for part in (0, 1))
        return keys, values


@levels
def test_every_token_reads_its_whole_prompt_and_no_other(level: str) -> None:
    prompts = Prompts(LENGTHS, torch.float32, level)
    computed = torch.split(prompts.attend(num_threads=2).squeeze(2), list(LENGTHS))
    queries = torch.split(prompts.queries.squeeze(2), list(LENGTHS))
    for prompt, (own, result) in enumerate(zip(queries, computed, strict=True)):
        torch.testing.assert_close(result.double(), reference(own, *prompts.cached(prompt)), atol=2e-6, rtol=1e-5)


@levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_sums_is_that_of_decodes_on_any_number_of_threads(dtype: torch.dtype, level: str) -> None:
    prompts = Prompts(LENGTHS, dtype, level)
    expected = prompts.decode_as_last()
    for num_threads in (1, 2, 5):
        assert torch.equal(prompts.attend(num_threads), expected)


@levels
def test_a_window_is_refused(level: str) -> None:
    prompts = Prompts((5,), torch.float32, level)
    rows = np.array([0])
    with pytest.raises(ValueError, match="window"):
        prompts.attention.plan_chunks(
            prompts.table, rows, prompts.lengths, prompts.lengths, 3, 1, is_bidirectional=True
        )
