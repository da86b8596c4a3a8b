"""Builds the forward batch of one step from the sequence table: on the host, then brought to the device."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.runtime.attention.backend import AttentionPlanner, RunPlanner
from alignedserve.runtime.attention.ring_tables import RingPlan, RingTables
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable, are_same, tokens_of
from alignedserve.runtime.engine.forward.forward_batch import LastTokenPlanner
from alignedserve.runtime.engine.steps.hidden_cache import HiddenContexts, HiddenPlan, SlicePlan
from alignedserve.runtime.engine.steps.step import Forced, Slices, StatePlanner, StepBatch
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.pictures import PictureRows, picture_rows, places_of_rows
from kernels.cpu.next_tokens import KnownTokens, next_tokens
from kernels.lora import AdapterMatrices, AdapterRows, DevicePlan

_NO_ROWS = np.empty(0, np.int64)


class _OfRows(NamedTuple):
    version: int  # of the table
    rows: IntArray
    counts: IntArray
    places: IntArray
    asks_prompt_logprobs: bool
    wants_embeddings: IntArray
    has_adapters: bool
    has_pictures: bool
    has_places: bool


class BatchBuilder:
    """Builds steps from a sequence table; it changes only the table's marks of unclean tails."""

    def __init__(
        self,
        table: SequenceTable,
        storage: BlockStorage,
        planner: AttentionPlanner,
        *,
        decode_sizes: Sequence[int] = (),
        hidden: HiddenContexts | None = None,
        last: LastTokenPlanner | None = None,
        rings: RingTables | None = None,
    ) -> None:
        """`decode_sizes`, ascending: a batch of decodes is padded to the next of them. `hidden`: plans the sequences
        with hidden caches, if there may be any. `last`: plans the last layer, if it is to leave tokens out. `rings`: of
        the sequences, if they have some."""
        self._table = table
        self._storage = storage
        self._planner = planner
        self._decode_sizes = decode_sizes
        self._hidden = hidden
        self._last = last
        self._rings = rings
        self._states = StatePlanner(table, storage) if storage.layout.has_states and rings is None else None
        self._adapters: AdapterRows | None = None  # of the latest step: those of the next are often the same
        self._kept: _OfRows | None = None
        self._known = KnownTokens(
            table.tokens,
            table.block_tables,
            table.num_computed,
            table.num_tokens,
            table.is_reversed,
            table.block_size,
            storage.slot_stride,
        )

    def build(self, request_ids: Sequence[RequestId], num_tokens: Sequence[int]) -> StepBatch:
        rows = self._table.rows(request_ids)
        counts = np.array(num_tokens, np.int64)
        self._check(rows, counts)
        is_decode, is_hidden = counts == 1, self._table.is_hidden[rows]
        hidden = None
        if is_hidden.any():
            assert self._hidden is not None, "a hidden cache where there is none"
            hidden = self._hidden.plan(rows[is_hidden], counts[is_hidden])
            rows, counts, is_decode = rows[~is_hidden], counts[~is_hidden], is_decode[~is_hidden]
        elif is_decode.all():
            return self.build_decodes(rows)
        return self._build(rows[is_decode], rows[~is_decode], counts[~is_decode], hidden)

    def build_slices(self, slices: Slices, forced: Forced | None = None) -> StepBatch:
        request_ids, num_tokens = [part[0] for part in slices], [part[1] for part in slices]
        if not forced:
            return self.build(request_ids, num_tokens)
        are_decodes = max(num_tokens) == 1
        num_tokens = [count + len(forced.get(key, ())) for key, count in zip(request_ids, num_tokens, strict=True)]
        return (self.build_runs if are_decodes else self.build)(request_ids, num_tokens)

    def build_runs(self, request_ids: Sequence[RequestId], num_tokens: Sequence[int]) -> StepBatch:
        """Build the same batch, whose slices are short, as one of decodes if the planner has such."""
        table, planner = self._table, self._planner
        rows, counts = table.rows(request_ids), np.array(num_tokens, np.int64)
        if not isinstance(planner, RunPlanner) or table.is_hidden[rows].any():
            return self.build(request_ids, num_tokens)
        self._check(rows, counts)
        rings = None if self._rings is None else self._rings.begin(rows, counts)
        token_rows, positions = tokens_of(rows, table.num_computed[rows], counts)
        blocks, offsets = table.places(token_rows, positions)
        slots = blocks * self._storage.slot_stride + offsets
        plan = SlicePlan(planner.plan_runs(rows, counts), rows, counts, token_rows, positions, slots)
        return self._step(plan, _NO_ROWS, rings=rings)

    def build_decodes(self, rows: IntArray) -> StepBatch:
        return self._decodes(rows, self._num_padding(len(rows)))

    def build_ahead(self, rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray) -> StepBatch:
        return self._build(rows, chunk_rows, chunk_counts) if len(chunk_rows) else self.build_decodes(rows)

    def build_padding(self, size: int, adapters: DevicePlan | None = None) -> StepBatch:
        """Build a batch of `size` padding rows. `adapters`: of as many, to be recorded for others that have some."""
        return self._decodes(_NO_ROWS, size)._replace(adapters=adapters)

    def complete(self, step: StepBatch) -> StepBatch:
        """Fill in the tokens and blocks that may have been unknown when a step of decodes was planned ahead."""
        table, count = self._table, len(step.rows)
        positions = step.positions[:count]
        assert (positions < table.num_blocks[step.rows] * table.block_size).all(), "too few blocks for the slice"
        blocks, offsets = table.places(step.rows, positions)
        step.token_ids[:count] = table.tokens[step.rows, positions]
        step.slots[:count] = blocks * self._storage.slot_stride + offsets
        step.attention.set_last_blocks(blocks)
        if step.rings is None or self._rings is None:
            return step
        return step._replace(rings=step.rings._replace(kept=self._rings.kept_by(step.rows)))

    def _check(self, rows: IntArray, counts: IntArray) -> None:
        table = self._table
        assert len(rows), "a step needs at least one slice"
        assert len(set(rows.tolist())) == len(rows), "two slices of one request in one step"
        after = table.num_computed[rows] + counts
        assert counts.min() >= 1, "a slice computes at least one token"
        assert (after <= table.num_tokens[rows]).all(), "a slice goes beyond the known tokens"
        assert (after <= table.num_blocks[rows] * table.block_tokens[rows]).all(), "too few blocks for the slice"

    def _unclean_tails(self, rows: IntArray) -> tuple[tuple[BlockId, int], ...]:
        table = self._table
        rows = rows[table.has_unclean_tail[rows]]
        table.has_unclean_tail[rows] = False
        places = [divmod(computed, table.block_size) for computed in table.num_computed[rows].tolist()]
        return tuple(
            (BlockId(int(table.block_tables[row, block])), slot)
            for row, (block, slot) in zip(rows.tolist(), places, strict=True)
            if slot
        )

    def _num_padding(self, num_decodes: int) -> int:
        at = bisect_left(self._decode_sizes, num_decodes)
        return self._decode_sizes[at] - num_decodes if at < len(self._decode_sizes) else 0

    def _decodes(self, rows: IntArray, num_padding: int) -> StepBatch:
        table, storage, reads_unused = self._table, self._storage, self._planner.reads_unused_slots
        rings = None if self._rings is None else self._rings.begin(rows, np.ones(len(rows), np.int64))
        attention = self._planner.plan(rows, _NO_ROWS, _NO_ROWS, num_padding)
        rows = attention.decode_rows
        scratch_slot = storage.scratch_block * storage.slot_stride if num_padding else 0
        token_ids, positions, slots, are_last = next_tokens(self._known, rows, num_padding, scratch_slot)
        facts = self._of_rows(rows)
        sampled_rows, sampled_at, wants_embeddings = rows, facts.places, facts.wants_embeddings
        if not are_last:
            sampled_at = np.flatnonzero(table.num_computed[rows] + 1 == table.num_tokens[rows])
            sampled_rows = rows[sampled_at]
            wants_embeddings = np.flatnonzero(table.wants_embedding[sampled_rows])
        fresh_blocks = _NO_ROWS
        if reads_unused:
            fresh_blocks = slots[: len(rows)][positions[: len(rows)] % table.block_size == 0] // storage.slot_stride
            if rings is not None:
                fresh_blocks = np.concatenate((fresh_blocks, rings.fresh_blocks))
        if not facts.has_adapters:
            self._adapters = None
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            fresh_blocks=fresh_blocks,
            unclean_tails=self._unclean_tails(rows) if reads_unused else (),
            attention=attention,
            rows=rows,
            counts=facts.counts,
            first_rows=facts.places,
            sampled_rows=sampled_rows,
            sampled_at=sampled_at,
            wants_prompt_logprobs=self._prompt_logprob_slices(rows) if facts.asks_prompt_logprobs else (),
            wants_embeddings=wants_embeddings,
            is_decode=are_last,
            adapters=self._adapter_rows(rows, len(token_ids)) if facts.has_adapters else None,
            places=self._places(rows, positions, facts.counts, facts.places) if facts.has_places else None,
            pictures=self._picture_rows(rows, positions, facts.counts, facts.places) if facts.has_pictures else None,
            states=None if self._states is None else self._states.plan(rows, facts.counts, num_padding),
            rings=None if rings is None else self._with_slots(rings, rows, positions[: len(rows)], num_padding),
        )

    def _of_rows(self, rows: IntArray) -> _OfRows:
        cached, table = self._kept, self._table
        if cached is None or cached.version != table.version or not are_same(rows, cached.rows):
            self._kept = cached = _OfRows(
                version=table.version,
                rows=rows,
                counts=np.ones(len(rows), np.int64),
                places=np.arange(len(rows)),
                asks_prompt_logprobs=bool(table.wants_prompt_logprobs[rows].any()),
                wants_embeddings=np.flatnonzero(table.wants_embedding[rows]),
                has_adapters=bool(table.has_adapter[rows].any()),
                has_pictures=bool(table.pictures_end[rows].any()),
                has_places=bool(table.has_places[rows].any()),
            )
        return cached

    def _build(
        self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray, hidden: HiddenPlan | None = None
    ) -> StepBatch:
        rings = None
        if self._rings is not None:
            counts = np.concatenate((np.ones(len(decode_rows), np.int64), chunk_counts))
            rings = self._rings.begin(np.concatenate((decode_rows, chunk_rows)), counts)
        plain, fresh_blocks = self._plan(decode_rows, chunk_rows, chunk_counts)
        if rings is not None and self._planner.reads_unused_slots:
            fresh_blocks = np.concatenate((fresh_blocks, rings.fresh_blocks))
        return self._step(plain, fresh_blocks, has_chunks=len(chunk_rows) > 0, hidden=hidden, rings=rings)

    def _step(
        self,
        plain: SlicePlan,
        fresh_blocks: IntArray,
        *,
        has_chunks: bool = False,
        hidden: HiddenPlan | None = None,
        rings: RingPlan | None = None,
    ) -> StepBatch:
        table = self._table
        slices = plain if hidden is None else hidden.after(plain)
        rows, counts = slices.rows, slices.counts
        token_ids = table.tokens[slices.token_rows, slices.positions].astype(np.int64)
        last_rows = np.cumsum(counts) - 1
        reads_unused = self._planner.reads_unused_slots
        is_sampled = table.num_computed[rows] + counts == table.num_tokens[rows]
        sampled_rows, sampled_at = rows[is_sampled], last_rows[is_sampled]
        wants_prompt_logprobs = self._prompt_logprob_slices(rows)
        last = None
        if has_chunks and hidden is None and not wants_prompt_logprobs:
            last = None if self._last is None else self._last.plan(sampled_rows, sampled_at)
        if last is not None:
            sampled_rows, sampled_at = last.rows, last.token_rows
        return StepBatch(
            token_ids=token_ids,
            positions=slices.positions,
            slots=slices.slots,
            fresh_blocks=fresh_blocks,
            unclean_tails=self._unclean_tails(plain.rows) if reads_unused else (),
            attention=slices.attention,
            rows=rows,
            counts=counts,
            first_rows=last_rows - counts + 1,
            sampled_rows=sampled_rows,
            sampled_at=sampled_at,
            wants_prompt_logprobs=wants_prompt_logprobs,
            wants_embeddings=np.flatnonzero(table.wants_embedding[sampled_rows]),
            is_decode=False,
            hidden=hidden,
            last=last,
            adapters=self._adapter_rows(slices.token_rows, len(token_ids)),
            places=self._places(rows, slices.positions, counts, last_rows - counts + 1),
            pictures=self._picture_rows(rows, slices.positions, counts, last_rows - counts + 1),
            states=None if self._states is None else self._states.plan(rows, counts),
            rings=None if rings is None else self._with_slots(rings, slices.token_rows, slices.positions),
        )

    def _plan(self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray) -> tuple[SlicePlan, IntArray]:
        table = self._table
        attention = self._planner.plan(decode_rows, chunk_rows, chunk_counts)
        rows = np.concatenate([attention.decode_rows, chunk_rows])
        counts = np.ones(len(rows), np.int64)
        counts[len(decode_rows) :] = chunk_counts
        token_rows, positions = rows, table.num_computed[rows]
        if len(chunk_counts):
            token_rows, positions = tokens_of(rows, positions, counts)
        blocks, offsets = table.places(token_rows, positions)
        slots = blocks * self._storage.slot_stride + offsets
        fresh_blocks = blocks[positions % table.block_size == 0] if self._planner.reads_unused_slots else _NO_ROWS
        return SlicePlan(attention, rows, counts, token_rows, positions, slots), fresh_blocks

    def _with_slots(self, plan: RingPlan, token_rows: IntArray, positions: IntArray, num_padding: int = 0) -> RingPlan:
        assert self._rings is not None, "a plan without rings"
        stride = self._storage.slot_stride
        plan = plan._replace(slots=self._rings.slots(token_rows, positions, stride))
        return plan.padded(num_padding, self._storage.scratch_block, stride) if num_padding else plan

    def _adapter_rows(self, token_rows: IntArray, num_tokens: int) -> AdapterRows | None:
        table = self._table
        if not table.has_adapter[token_rows].any():
            self._adapters = None
            return None
        distinct: dict[int, int] = {}  # places of adapters, by their identity
        adapters: list[AdapterMatrices] = []
        of_sequence = np.full(len(table.has_adapter), -1, np.int64)
        for row in np.unique(token_rows[table.has_adapter[token_rows]]).tolist():
            adapter = table.sequence(row).adapter
            assert adapter is not None, f"row {row} has no adapter"
            if id(adapter) not in distinct:
                distinct[id(adapter)] = len(adapters)
                adapters.append(adapter)
            of_sequence[row] = distinct[id(adapter)]
        of_row = np.full(num_tokens, -1, np.int64)
        of_row[: len(token_rows)] = of_sequence[token_rows]
        if self._adapters is None or not self._adapters.are(adapters, of_row):
            self._adapters = AdapterRows(adapters, of_row, self._storage.device)
        return self._adapters

    def _places(self, rows: IntArray, positions: IntArray, counts: IntArray, first_rows: IntArray) -> Tensor | None:
        table = self._table
        having = np.flatnonzero(table.has_places[rows]).tolist()
        row_places = [(int(first_rows[at]), int(counts[at]), table.sequence(int(rows[at])).places) for at in having]
        return places_of_rows(positions, row_places).to(self._storage.device) if row_places else None

    def _picture_rows(
        self, rows: IntArray, positions: IntArray, counts: IntArray, first_rows: IntArray
    ) -> PictureRows | None:
        first = positions[first_rows]
        slices = []
        for index in np.flatnonzero(self._table.pictures_end[rows] > first).tolist():
            embeddings = self._table.sequence(int(rows[index])).pictures
            assert embeddings is not None, f"row {rows[index]} has no pictures"
            slices.append((int(first[index]), int(counts[index]), int(first_rows[index]), embeddings))
        return picture_rows(slices, self._storage.device) if slices else None

    def _prompt_logprob_slices(self, rows: IntArray) -> tuple[int, ...]:
        table = self._table
        asks = table.wants_prompt_logprobs[rows]
        if not asks.any():
            return ()
        asks &= table.num_computed[rows] + 1 < table.prompt_lens[rows]
        return tuple(np.flatnonzero(asks).tolist())
