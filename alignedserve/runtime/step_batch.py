"""Builds the forward batch of one step from the sequence table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.attention import AttentionPlanner, StepAttention
from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.forward_batch import ForwardBatch
from alignedserve.runtime.sequences import IntArray, SequenceTable


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A forward batch and how to read its result. Slices are in batch order: decodes, then chunks."""

    batch: ForwardBatch
    rows: IntArray  # [slices] rows of the sequence table
    counts: IntArray  # [slices] tokens of each
    first_rows: IntArray  # [slices] first token row of each
    sampled_rows: IntArray  # rows of the sequence table that reach their last known token
    sampled_at: Tensor  # int64: the token rows whose logits they need, in the same order
    wants_prompt_logprobs: tuple[int, ...]  # slices that compute prompt tokens of sequences that asked
    padded_share: float  # of the time of decode attention, see StepAttention


class BatchBuilder:
    """Reads the table; changes nothing in it but the mark of an unclean tail."""

    def __init__(self, table: SequenceTable, storage: BlockStorage, planner: AttentionPlanner) -> None:
        self._table = table
        self._storage = storage
        self._planner = planner

    def build(self, request_ids: Sequence[RequestId], num_tokens: Sequence[int]) -> StepBatch:
        """The batch that computes the next `num_tokens[i]` tokens of each request."""
        rows = self._table.rows(request_ids)
        counts = np.array(num_tokens, np.int64)
        self._check(rows, counts)
        is_decode = counts == 1
        if is_decode.all():
            decode_rows, chunk_rows, chunk_counts = rows, rows[:0], counts[:0]
        else:
            decode_rows, chunk_rows, chunk_counts = rows[is_decode], rows[~is_decode], counts[~is_decode]
        attention = self._planner.plan(decode_rows, chunk_rows, chunk_counts)
        return self._assemble(attention, np.concatenate([attention.decode_rows, chunk_rows]), chunk_counts)

    def _check(self, rows: IntArray, counts: IntArray) -> None:
        table = self._table
        assert len(rows), "a step needs at least one slice"
        assert len(set(rows.tolist())) == len(rows), "two slices of one request in one step"
        after = table.num_computed[rows] + counts
        assert counts.min() >= 1, "a slice computes at least one token"
        assert (after <= table.num_tokens[rows]).all(), "a slice goes beyond the known tokens"
        assert (after <= table.num_blocks[rows] * table.block_size).all(), "too few blocks for the slice"
        if self._planner.reads_unused_slots and table.has_unclean_tail[rows].any():
            for row in rows[table.has_unclean_tail[rows]].tolist():
                self._clean_tail(row)

    def _clean_tail(self, row: int) -> None:
        """The slots after the cached tokens are read as well: they must hold finite numbers."""
        table = self._table
        block, slot = divmod(int(table.num_computed[row]), table.block_size)
        if slot:
            self._storage.zero_tail(BlockId(int(table.block_tables[row, block])), slot)
        table.has_unclean_tail[row] = False

    def _assemble(self, attention: StepAttention, rows: IntArray, chunk_counts: IntArray) -> StepBatch:
        table, block_size = self._table, self._table.block_size
        num_decodes = len(rows) - len(chunk_counts)
        counts = np.ones(len(rows), np.int64)
        counts[num_decodes:] = chunk_counts
        token_rows, positions = rows, table.num_computed[rows]
        if len(chunk_counts):
            token_rows = np.repeat(rows, counts)
            chunk_starts = zip(positions[num_decodes:].tolist(), chunk_counts.tolist(), strict=True)
            chunks = [np.arange(start, start + count) for start, count in chunk_starts]
            positions = np.concatenate([positions[:num_decodes], *chunks])
        columns, offsets = np.divmod(positions, block_size)
        blocks = table.block_tables[token_rows, columns]
        last_rows = np.cumsum(counts) - 1
        is_sampled = table.num_computed[rows] + counts == table.num_tokens[rows]
        batch = ForwardBatch(
            token_ids=self._tensor(table.tokens[token_rows, positions].astype(np.int64)),
            positions=self._tensor(positions),
            slots=self._tensor(blocks * self._storage.slot_stride + offsets),
            fresh_blocks=blocks[offsets == 0] if self._planner.reads_unused_slots else blocks[:0],
            attention=attention,
        )
        return StepBatch(
            batch=batch,
            rows=rows,
            counts=counts,
            first_rows=last_rows - counts + 1,
            sampled_rows=rows[is_sampled],
            sampled_at=self._tensor(last_rows[is_sampled]),
            wants_prompt_logprobs=self._prompt_logprob_slices(rows),
            padded_share=attention.padded_share,
        )

    def _prompt_logprob_slices(self, rows: IntArray) -> tuple[int, ...]:
        table = self._table
        asks = table.wants_prompt_logprobs[rows] & (table.num_computed[rows] + 1 < table.prompt_lens[rows])
        return tuple(np.flatnonzero(asks).tolist())

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(self._storage.device)
