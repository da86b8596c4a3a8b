"""Computes tokens: one forward pass and one sampling step per call, for whatever mixture of sequences is asked for."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SampledToken, TokenLogprob
from alignedserve.runtime.attention import AUTO
from alignedserve.runtime.attention_choice import attention_planner
from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.decoder import Decoder
from alignedserve.runtime.sampling import Sampler, logprob_entries
from alignedserve.runtime.sequences import NewSequence, SequenceTable
from alignedserve.runtime.step_batch import BatchBuilder, StepBatch

__all__ = ["Engine", "NewSequence", "PromptLogprobs", "StepOutput", "StepSlice", "StepTimes"]

# Logits of this many prompt tokens are held at a time for prompt logprobs.
_PROMPT_LOGPROB_ROWS = 64


class StepSlice(NamedTuple):
    """Work of one sequence in one step: compute its next `num_tokens` known tokens."""

    request_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens."""

    request_id: RequestId
    first_position: int  # of the prompt token that entries[0] is about; 1 or more
    entries: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where one step's time went, in seconds."""

    prepare_s: float
    forward_s: float  # the pass and its logits
    sampling_s: float  # and the log-probabilities of prompt tokens
    attention_s: float  # of the pass, as Decoder.attention_s
    chunk_attention_s: float  # alike
    padded_share: float  # of attention_s, see StepAttention


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step produced."""

    sampled: list[SampledToken]  # of every sequence whose slice reached its last known token, in no set order
    failed: list[RequestId]  # their logits were not numbers: no token; remove them
    prompt_logprobs: list[PromptLogprobs]
    times: StepTimes


class Engine:
    """One model, its block storage and the sequences being computed.

    Single threaded; no I/O; knows nothing of Ray or scheduling. A sequence holds the tokens it has so far and how many
    of them are computed. A slice computes the next ones and writes their keys and values into the sequence's blocks;
    a slice that reaches the last known token samples the next one, which joins the sequence. That rule covers whole
    and chunked prefill, decode, recompute after preemption and resuming from a copy of the blocks.

    Bad calls (unknown request, too few blocks, too many sequences or tokens) are broken invariants of the caller.
    """

    def __init__(
        self,
        *,
        model: Decoder,
        storage: BlockStorage,
        max_sequences: int,
        max_context_len: int,
        attention: str = AUTO,
    ) -> None:
        """`attention`: one of CHOICES of runtime.attention. Raises ConfigError for one that cannot be had here."""
        layout, config = storage.layout, model.config
        assert config.rope is not None or max_context_len <= config.max_position_embeddings, (
            "more context than positions"
        )
        assert layout == config.block_layout(layout.block_size, model.dtype_name), "the storage is not of this model"
        self.model = model
        self.storage = storage
        self._table = SequenceTable(
            max_sequences=max_sequences, max_context_len=max_context_len, block_size=layout.block_size
        )
        self._builder = BatchBuilder(self._table, storage, attention_planner(attention, self._table, storage, config))
        self._sampler = Sampler(
            max_sequences=max_sequences, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
        )

    @property
    def num_sequences(self) -> int:
        """Sequences that hold a row."""
        return len(self._table)

    def has_sequence(self, request_id: RequestId) -> bool:
        """Whether the sequence is here."""
        return request_id in self._table

    def add_sequence(self, sequence: NewSequence) -> None:
        """Take in a sequence. The caller keeps owning the blocks.

        Blocks that hold cached tokens must be written before the sequence's first slice, which clears the unused slots
        of the last of them. Full cached blocks may be shared with others, a partly filled one may not.
        """
        assert 0 <= min(sequence.token_ids) <= max(sequence.token_ids) < self.model.config.vocab_size, "unknown token"
        row = self._table.add(sequence)
        self._sampler.add(row, sequence)

    def append_blocks(self, request_id: RequestId, block_ids: Sequence[BlockId]) -> None:
        """Extend the sequence's block table; it then owns room for that many more tokens."""
        self._table.append_blocks(request_id, block_ids)

    def remove_sequence(self, request_id: RequestId) -> None:
        """Free the sequence's row. Its blocks are the caller's to free or to copy."""
        self._sampler.remove(self._table.remove(request_id))

    def token_ids(self, request_id: RequestId) -> tuple[int, ...]:
        """Prompt and generated tokens so far."""
        row = self._table.row(request_id)
        return tuple(self._table.tokens[row, : self._table.num_tokens[row]].tolist())

    def generated_token_ids(self, request_id: RequestId) -> tuple[int, ...]:
        """Generated tokens so far, those the sequence joined with included."""
        row = self._table.row(request_id)
        first = self._table.sequence(row).prompt_len
        return tuple(self._table.tokens[row, first : self._table.num_tokens[row]].tolist())

    def num_computed(self, request_id: RequestId) -> int:
        """Leading tokens whose keys and values lie in the blocks."""
        return int(self._table.num_computed[self._table.row(request_id)])

    def num_tokens(self, request_id: RequestId) -> int:
        """Tokens known so far."""
        return int(self._table.num_tokens[self._table.row(request_id)])

    @torch.inference_mode()
    def execute(self, slices: Sequence[tuple[RequestId, int]]) -> StepOutput:
        """One step over one slice per sequence: at least one slice, each within its sequence's tokens and blocks.

        A slice is a StepSlice, or a plain pair of the same.
        """
        started = time.perf_counter()
        step = self._builder.build([part[0] for part in slices], [part[1] for part in slices])
        prepared = time.perf_counter()
        hidden = self.model.forward(step.batch, self.storage)
        logits = self.model.logits(hidden[step.sampled_at]) if len(step.sampled_rows) else None
        forwarded = time.perf_counter()
        self._table.num_computed[step.rows] += step.counts
        prompt_logprobs = [self._prompt_logprobs(step, index, hidden) for index in step.wants_prompt_logprobs]
        sampled, failed = self._sample(step, logits) if logits is not None else ([], [])
        del hidden, logits  # giving a megabyte back takes time as well, and belongs to the step
        times = StepTimes(
            prepare_s=prepared - started,
            forward_s=forwarded - prepared,
            sampling_s=time.perf_counter() - forwarded,
            attention_s=self.model.attention_s,
            chunk_attention_s=self.model.chunk_attention_s,
            padded_share=step.padded_share,
        )
        return StepOutput(sampled, failed, prompt_logprobs, times)

    def _sample(self, step: StepBatch, logits: Tensor) -> tuple[list[SampledToken], list[RequestId]]:
        table, rows = self._table, step.sampled_rows
        num_tokens = table.num_tokens[rows]
        choice = self._sampler.choose(rows, num_tokens, logits)
        request_ids = table.request_ids
        ids = [request_ids[row] for row in rows.tolist()]
        logprobs = choice.logprobs
        sampled = [
            SampledToken(request_id, token_id, logprobs.get(index))
            for index, (request_id, token_id) in enumerate(zip(ids, choice.token_ids.tolist(), strict=True))
        ]
        is_usable = choice.is_usable
        if is_usable.all():
            table.tokens[rows, num_tokens] = choice.token_ids
            table.num_tokens[rows] = num_tokens + 1
            return sampled, []
        table.tokens[rows[is_usable], num_tokens[is_usable]] = choice.token_ids[is_usable]
        table.num_tokens[rows[is_usable]] += 1
        good, bad = np.flatnonzero(is_usable).tolist(), np.flatnonzero(~is_usable).tolist()
        return [sampled[index] for index in good], [ids[index] for index in bad]

    def _prompt_logprobs(self, step: StepBatch, index: int, hidden: Tensor) -> PromptLogprobs:
        """Entries for the prompt tokens that follow the tokens of slice `index`."""
        row, first_row = int(step.rows[index]), int(step.first_rows[index])
        sequence = self._table.sequence(row)
        last_computed = int(self._table.num_computed[row])
        first = last_computed - int(step.counts[index]) + 1
        count = min(last_computed + 1, sequence.prompt_len) - first
        targets = torch.from_numpy(self._table.tokens[row, first : first + count].astype(np.int64)).to(hidden.device)
        num_top = sequence.sampling.num_prompt_logprobs or 0
        entries: list[TokenLogprob] = []
        for start in range(0, count, _PROMPT_LOGPROB_ROWS):
            stop = min(start + _PROMPT_LOGPROB_ROWS, count)
            logits = self.model.logits(hidden[first_row + start : first_row + stop])
            entries += logprob_entries(logits.float(), targets[start:stop], [num_top] * (stop - start))
        return PromptLogprobs(sequence.request_id, first, tuple(entries))
