"""The last layer goes on with the tokens whose logits are asked for, and gives them what computing all gives."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.backend import TORCH
from alignedserve.runtime.attention.registry import attention_planner
from alignedserve.runtime.attention.sequence_table import NewSequence, SequenceTable
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.last_tokens import LastTokenContexts, LastTokenPlanner
from alignedserve.runtime.engine.steps.step_batch import BatchBuilder, StepBatch
from kernels.cpu.paged_attention import supported_levels
from tests.support.tiny_engines import (
    BLOCK_SIZE,
    GREEDY,
    TinyEngine,
    poisoned_storage,
    random_tokens,
    shuffled_blocks,
    tiny_decoder,
)
from tests.support.tiny_models import make_tiny_model

KERNELS = (TORCH, *supported_levels()[:1])
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


class Halves:
    """Two batch builders over the same table and storage: one leaves tokens out on the last layer, one does not."""

    def __init__(self, decoder: Decoder, attention: str) -> None:
        self.decoder = decoder
        self.storage = poisoned_storage(decoder)
        self.table = SequenceTable(max_sequences=4, max_context_len=200, block_size=BLOCK_SIZE)
        contexts = LastTokenContexts(self.table)
        all_planner, last_planner = (
            attention_planner(attention, own, self.storage, decoder.config, decoder.dtype)
            for own in (self.table, contexts)
        )
        self.whole = BatchBuilder(self.table, self.storage, all_planner)
        self.last = BatchBuilder(self.table, self.storage, all_planner, last=LastTokenPlanner(contexts, last_planner))
        free = shuffled_blocks(3)
        for seed, (request_id, length) in enumerate(((A, 41), (B, 9), (C, 22))):
            blocks = tuple(free.pop() for _ in range(blocks_for(length + 8, BLOCK_SIZE)))
            tokens = tuple(random_tokens(seed, length))
            self.table.add(NewSequence(request_id, tokens, length, 0, blocks, GREEDY))

    def forward(self, builder: BatchBuilder, slices: dict[RequestId, int]) -> tuple[StepBatch, Tensor]:
        step = builder.build(list(slices), list(slices.values()))
        return step, self.decoder.forward(step.forward_batch(self.decoder.device), self.storage)

    def step(self, slices: dict[RequestId, int]) -> None:
        """Compute both ways; hidden vectors and the cache are the same but for the order of sums."""
        whole, all_hidden = self.forward(self.whole, slices)
        expected = dict(zip(whole.sampled_rows.tolist(), all_hidden[whole.sampled_at], strict=True))
        cache = self.storage.bytes.clone()
        step, hidden = self.forward(self.last, slices)
        assert torch.equal(self.storage.bytes, cache)
        assert step.last is not None
        assert len(hidden) == len(step.sampled_rows) == len(expected)
        for row, own in zip(step.sampled_rows.tolist(), hidden, strict=True):
            torch.testing.assert_close(own, expected[row], rtol=1e-4, atol=1e-5)
        assert np.array_equal(np.sort(step.rows), np.sort(whole.rows))
        self.table.num_computed[step.rows] += step.counts


@pytest.mark.parametrize("attention", KERNELS)
@pytest.mark.parametrize("family", ["llama", "opt_post_norm", "gpt_neox", "mistral_window", "gemma3_text"])
def test_rows_that_are_sampled_are_those_of_the_whole_pass(family: str, attention: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path, family)
    halves = Halves(tiny_decoder(tmp_path), attention)
    halves.step({A: 7})  # nothing is sampled
    halves.step({A: 20, B: 9})  # of one sequence the last token is computed
    row = halves.table.row(B)
    halves.table.tokens[row, 9] = 5
    halves.table.num_tokens[row] += 1
    halves.step({A: 14, B: 1, C: 22})  # the rest of a prompt, a decode, a whole prompt


def test_prompt_logprobs_have_every_token_computed(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "llama")
    tiny = TinyEngine(tiny_decoder(tmp_path))
    tiny.add("a", random_tokens(0, 11), SamplingParams(temperature=0.0, max_tokens=4, num_prompt_logprobs=0))
    tiny.add("b", random_tokens(1, 6))
    output = tiny.step(a=11, b=6)
    assert [len(own.entries) for own in output.prompt_logprobs] == [10]
    assert len(output.sampled) == 2
