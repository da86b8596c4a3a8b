"""Runs of tokens that read one another both ways: by the native kernels and in PyTorch, against the plain reference."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.core.picture import settled_len
from alignedserve.runtime.attention.backend import TORCH
from alignedserve.runtime.attention.sequence_table import ends_of
from kernels.cpu.native import supported_levels
from kernels.cpu.paged_attention import PagedAttention
from tests.support.kernel_reference import attention_of_chunk
from tests.support.models.tiny_engines import LogitsProbe, random_tokens, tiny_decoder
from tests.support.models.tiny_models import make_tiny_model
from tests.unit.runtime.attention.test_native_backend import LAYER, make_batch

RUNS = ((15, 40), (300, 256), (660, 1))


def test_ends_are_those_of_runs() -> None:
    ends = ends_of({7: ((3, 4), (9, 2))}, np.array([2, 7]), np.array([5, 1]), np.array([2, 12]))
    assert ends is not None
    assert ends.tolist() == [6, 7, 2, 3, 7, 7, 7, 7, 8, 9, 11, 11, 12, 13]
    assert ends_of({7: ((3, 4),)}, np.array([2]), np.array([5]), np.array([2])) is None
    assert [settled_len(((4, 6),), count) for count in (3, 4, 5, 9, 10, 11)] == [3, 4, 4, 4, 10, 11]


@pytest.mark.parametrize("level", supported_levels())
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_native_kernels_read_runs_both_ways(num_threads: int, window: int | None, level: str) -> None:
    lengths, counts = np.array([70, 700]), np.array([8, 690])
    batch = make_batch((2, 40), 16, torch.float32, lengths)
    queries = torch.randn(int(counts.sum()), 2, 3, 40, generator=torch.Generator().manual_seed(1))
    attended = torch.empty_like(queries)
    kernel = PagedAttention(batch.blocks, group=3, level=level)
    ends = ends_of({1: RUNS}, np.array([0, 1]), lengths - counts, counts)
    assert ends is not None
    args = (batch.tables, batch.rows, lengths, counts, window, num_threads)
    kernel.run(kernel.plan_chunks(*args, ends=ends), queries, attended, LAYER, True)
    rows = (queries.flatten(1, 2), attended.flatten(1, 2), torch.from_numpy(ends))
    parts = (torch.split(part, counts.tolist()) for part in rows)
    for (keys, values), own, results, reads in zip(batch.contexts, *parts, strict=True):
        expected = attention_of_chunk(own, keys, values, window, ends=reads)
        assert float((results.double() - expected).abs().max()) < 3e-6
    for wrong in (ends[:-1], ends - 1, ends + 700):
        with pytest.raises(ValueError, match="end"):
            kernel.plan_chunks(*args, ends=wrong)


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


PROMPTS = {"a": random_tokens(1, 60), "b": random_tokens(2, 6), "c": random_tokens(3, 40)}
CACHES = [("float32", None), ("bfloat16", None), ("float32", "int8")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral")
    make_tiny_model(folder, "mistral_window")
    return folder


def logits(probe: LogitsProbe, reversed_names: str) -> list[Tensor]:
    for name, tokens in PROMPTS.items():
        probe.add(name, tokens, is_reversed=name in reversed_names)
    probe.step(a=20, b=5, c=17)
    probe.step(b=1, a=30, c=1)
    for _ in range(6):
        probe.step(a=1, c=1)
    return [probe.logits(name) for name in PROMPTS]


@pytest.mark.parametrize("attention", [*supported_levels(), TORCH])
@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHES)
def test_reversed_blocks_change_no_bit(folder: Path, dtype: str, cache_dtype: str | None, attention: str) -> None:
    decoder = tiny_decoder(folder, dtype)
    natural, one, all_of_them = (
        logits(LogitsProbe(decoder, 16, attention, cache_dtype), names) for names in ("", "a", "abc")
    )
    for expected, some, every in zip(natural, one, all_of_them, strict=True):
        assert torch.equal(expected, some)
        assert torch.equal(expected, every)
