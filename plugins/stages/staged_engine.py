"""The engine of a worker's first stage: cuts steps into parts that follow each other through all stages.

The life of a part:
1. `_begin` tells the other stages of its slices, computes the first layers and sends what comes out.
2. The other stages compute theirs meanwhile, each its part; this one goes on with the next part.
3. `_finish` waits for the last stage's hidden vectors, computes logits and chooses tokens.
4. `_go_ahead`: while other parts of the step are on their way, sequences whose tokens are known go on with their next
   ones, as the next part. The step that asks for these finds them begun (`_take_ahead`); what nobody asks for leaves no
   more than keys and values behind the computed tokens, in slots that are written again before they are read.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
from typing_extensions import override

from alignedserve.core.ids import RequestId
from alignedserve.core.request import SampledToken
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence
from alignedserve.runtime.device.accelerator import in_inference_mode
from alignedserve.runtime.device.streams import DeviceStreams, Event, Stream
from alignedserve.runtime.engine.engine import NO_DRAFTS, Engine, MostDrafts
from alignedserve.runtime.engine.engine_options import NO_OWN_BLOCKS, EngineOptions, OwnBlocks
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.steps.step import NO_TIMES, Slices, StepBatch, StepLaunch, StepOutput, StepTimes
from alignedserve.runtime.grammar.token_masks import TokenMasks
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.direct_copies import PendingCopies
from plugins.stages.block_lender import BlockLender, Loan
from plugins.stages.group_choice import GroupChoice
from plugins.stages.stage_commands import PartSlice
from plugins.stages.stage_group import StageGroup
from plugins.stages.step_parts import Slice, group_size, step_parts

_NO_ROWS = np.empty(0, np.int64)
# Steps for which nothing goes ahead after one that asked for less than half of what had.
_PAUSE_STEPS = 8


@dataclass(slots=True)
class StagePart(StepLaunch):
    """A part of a step on its way through the stages."""

    number: int = 0
    wants_all: bool = False  # hidden vectors of all its tokens come back
    entries: IntArray | None = None  # of its rows, see SequenceTable, where it is ahead
    results_at: IntArray | None = None  # of its sampled rows, among what comes back; None: all
    borrowed: Sequence[Loan] = ()  # blocks that it writes; see BlockLender
    attention_s: float = 0.0


class Stages(NamedTuple):
    """The stages behind an engine's, and how steps go through them."""

    group: StageGroup
    all_blocks: BlockStorage  # of all parts of the blocks, or of the first stage's where each stage has its own
    goes_ahead: bool  # sequences decode behind their prompts, and have no states: a part nobody asks for changes those


class StagedEngine(Engine):
    """See Engine; on a CPU."""

    def __init__(
        self,
        *,
        model: Decoder,
        storage: BlockStorage,
        options: EngineOptions,
        stages: Stages,
        own_blocks: OwnBlocks = NO_OWN_BLOCKS,
        streams: DeviceStreams | None = None,
        masks: TokenMasks | None = None,
    ) -> None:
        """`storage`: of this stage's part of the blocks. `options`: without hidden caches. Others as of Engine."""
        group, all_blocks, goes_ahead = stages
        super().__init__(
            model=model,
            storage=storage,
            options=replace(options, launches_ahead=False),
            own_blocks=replace(own_blocks, lent=()),
            streams=streams,
            masks=masks,
            ranks=group,
        )
        self._stages, self._num_stages = group, group.size
        self._pending: PendingCopies = all_blocks.pending_copies
        has_own = all_blocks is storage
        self._lender = BlockLender(self._table, all_blocks, group if has_own else None, own_blocks.lent)
        self._ahead: list[StagePart] = []
        self._goes_ahead, self._choice = goes_ahead, GroupChoice()
        self._ended_s, self._num_paused = 0.0, 0  # when the step before did
        self._drafting.is_able = False
        self._may_go_ahead = np.zeros(len(self._table.sequences), np.bool_)  # by row
        self._eos = np.array(sorted(self.model.config.eos_token_ids), np.int64)
        self._asked = np.zeros(len(self._table.sequences), np.int64)  # tokens of each row; for one call at a time

    @override
    def add_sequence(self, sequence: NewSequence) -> None:
        super().add_sequence(sequence)
        row = self._table.row(sequence.request_id)
        self._may_go_ahead[row] = not (sequence.sampling.grammar or sequence.sampling.wants_embedding)

    @override
    def settle(self) -> None:
        for part in self._ahead:
            self._lender.take_back(part.borrowed, _NO_ROWS)
        self._ahead.clear()
        self._stages.settle()

    @in_inference_mode
    @override
    def execute(self, slices: Slices, *, may_go_on: bool = True, drafts: MostDrafts = NO_DRAFTS) -> StepOutput:
        assert not drafts, "stages verify no drafts"
        started = time.perf_counter()
        slices, skipped = self._without_unready(slices)
        if not slices:
            return StepOutput([], [], {}, [], NO_TIMES, skipped=skipped)
        slices = slices if self._late is None else self._late.caught_up(slices)
        is_decode = all(part[1] == 1 for part in slices)
        num_groups = self._num_stages if not is_decode or self._choice.is_grouped(len(slices)) else 1
        parts, rest = self._take_ahead(slices)
        is_ahead = bool(parts)
        sizes = [len(part.rows) for part in parts]
        parts += map(self._begin_slices, step_parts(rest, sizes, num_groups, self._is_whole))
        sampled: list[SampledToken] = []
        failed: list[RequestId] = []
        known = [_NO_ROWS]
        num_sampled = sum(len(part.rows) for part in parts)
        for part in parts:
            tokens, own_failed = self._finish(part)
            sampled, failed = sampled + tokens, failed + own_failed
            known.append(part.rows)
            has_group = num_groups > 1 and sum(map(len, known)) >= num_sampled // num_groups
            if may_go_on and self._goes_ahead and part is not parts[-1] and has_group:
                self._go_ahead(np.concatenate(known), group_size(num_sampled, self._num_stages))
                known = [_NO_ROWS]
        prompt_logprobs = [entry for part in parts for entry in part.prompt_logprobs]
        times = _times(parts, started, is_ahead=is_ahead)
        self._note_time(len(slices) if is_decode else 0)
        return StepOutput(sampled, failed, self._reasons(failed), prompt_logprobs, times, skipped=skipped)

    # --- the parts of a step

    def _begin_slices(self, slices: Sequence[Slice]) -> StagePart:
        step = self._builder.build_slices(slices)
        part = self._begin(step, slices)
        part.masks = self._sampler.start_masks(part.rows, part.num_tokens)
        self._enqueue_table(part)
        return part

    def _begin(self, step: StepBatch, slices: Sequence[Slice]) -> StagePart:
        table = self._table
        part = StagePart(step, table.num_tokens[step.sampled_rows], wants_all=step.needs_hidden and step.last is None)
        rows = table.rows([request_id for request_id, _ in slices])
        computed, known = table.num_computed[rows].tolist(), table.num_tokens[rows].tolist()
        part_slices = [
            PartSlice(request_id, before, count, of_sequence)
            for (request_id, count), before, of_sequence in zip(slices, computed, known, strict=True)
        ]
        self._stages.run_part(part_slices, wants_all=part.wants_all)
        batch = step._replace(last=None).forward_batch(self.storage.device)
        part.number = self._stages.send_rows(self.model.forward(batch, self.storage))
        part.attention_s = self.model.attention_s
        return part

    def _enqueue_table(self, part: StagePart) -> None:
        self._table.num_computed[part.step.rows] += part.step.counts
        self._table.num_tokens[part.rows] = part.num_tokens + 1

    def _finish(self, part: StagePart) -> tuple[list[SampledToken], list[RequestId]]:
        """Wait for a part's hidden vectors, choose its tokens and write them into the table.

        Returns them, and the sequences whose logits were not numbers.
        """
        hidden = self._stages.rows_of(part.number)
        self._lender.take_back(part.borrowed, part.rows)
        step, rows = part.step, part.rows
        if len(rows):
            sampled_hidden = hidden[step.sampled_at] if part.wants_all else hidden
            sampled_hidden = sampled_hidden if part.results_at is None else sampled_hidden[part.results_at]
            logits = self.model.logits(sampled_hidden)
            masks, changes = part.await_masks(), self._sampler.plan(rows, part.num_tokens)
            draw = self._sampler.start(rows, part.num_tokens, logits, masks, changes)
            part.draw = self._chosen.choose(draw, 0)
            part.on_host = self._chosen.copy_out(self._compute, slice(len(rows)))
            part.embeddings = self._prompts.embeddings(step, hidden)
        part.prompt_logprobs = self._prompts.logprobs(step, hidden)
        part.forwarded = time.perf_counter()
        return self._collect(part)

    # --- the next step's parts, before it

    def _go_ahead(self, rows: IntArray, at_most: int) -> None:
        table = self._table
        if self._num_paused or table.num_reversed or len(self._ahead) >= self._num_stages - 1:
            return
        known = table.num_tokens[rows]
        goes_on = self._may_go_ahead[rows] & (known < table.end_lens[rows]) & (known == table.num_computed[rows] + 1)
        goes_on &= ~np.isin(table.tokens[rows, known - 1], self._eos)
        rows, loans = self._lender.lend(rows[goes_on][:at_most])
        if not len(rows):
            return
        step = self._builder.build_decodes(rows)
        self._stages.lend_blocks([(table.request_ids[loan.row], loan.column, loan.block) for loan in loans])
        part = self._begin(step, [(request_id, 1) for request_id in table.ids_of(rows)])
        part.borrowed, part.entries = loans, table.entries[step.rows]
        self._ahead.append(part)
        # If the sequences leave, nobody may write these blocks before the part has ended.
        self._pending.record(cast(Stream, _Stream(self._stages, part.number)), step.slots // self.storage.slot_stride)

    def _take_ahead(self, slices: Slices) -> tuple[list[StagePart], list[Slice]]:
        ahead, self._ahead = self._ahead, []
        self._num_paused = max(self._num_paused - 1, 0)
        if not ahead:
            return [], list(slices)
        table, wanted = self._table, self._asked
        rows = table.rows([part[0] for part in slices])
        wanted[:] = 0
        wanted[rows] = [part[1] for part in slices]
        num_ahead = sum(len(part.step.rows) for part in ahead)
        taken = [part for part in ahead if self._take(part, wanted)]
        if 2 * sum(len(part.rows) for part in taken) < num_ahead:
            self._num_paused = _PAUSE_STEPS
        counts = wanted[rows].tolist()
        return taken, [(part[0], count) for part, count in zip(slices, counts, strict=True) if count]

    def _take(self, part: StagePart, wanted: IntArray) -> bool:
        table, step = self._table, part.step
        rows, known = step.rows, part.num_tokens
        is_taken = (wanted[rows] > 0) & (part.entries == table.entries[rows]) & (known == table.num_tokens[rows])
        is_taken &= table.num_computed[rows] + 1 == known
        if not is_taken.any():
            self._lender.take_back(part.borrowed, _NO_ROWS)
            return False
        if not is_taken.all():
            part.results_at = np.flatnonzero(is_taken)
            row = rows[part.results_at]
            part.step = step._replace(rows=row, sampled_rows=row, counts=step.counts[part.results_at])
            part.num_tokens = known[part.results_at]
        wanted[part.rows] = 0
        self._enqueue_table(part)
        return True

    def _note_time(self, num_decodes: int) -> None:
        before_s, self._ended_s = self._ended_s, time.perf_counter()
        if num_decodes:
            self._choice.note(num_decodes, self._ended_s - before_s)
        else:
            self._choice.forget()

    def _is_whole(self, request_id: RequestId) -> bool:
        return bool(self._table.wants_prompt_logprobs[self._table.row(request_id)])


def _times(parts: Sequence[StagePart], started: float, *, is_ahead: bool) -> StepTimes:
    return StepTimes(
        prepare_s=0.0,
        forward_s=time.perf_counter() - started,
        sampling_s=0.0,
        attention_s=sum(part.attention_s for part in parts),
        chunk_attention_s=0.0,
        padded_share=0.0,
        grammar_s=sum(part.grammar_s for part in parts),
        is_ahead=is_ahead,
    )


class _Stream:
    def __init__(self, stages: StageGroup, number: int) -> None:
        self._event = stages.event_of(number)

    def record(self) -> Event:
        return self._event
