"""Computes tokens: one forward pass and one sampling step per call, for any mixture of sequences.

How the engine of a worker's first rank keeps the other ranks at the same steps."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SampledToken
from alignedserve.runtime.attention.backend import AttentionPlanner, Contexts, TableKeeper
from alignedserve.runtime.attention.registry import attention_planner
from alignedserve.runtime.attention.ring_tables import RingTables
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence, SequenceTable
from alignedserve.runtime.device.accelerator import in_inference_mode
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import DeviceStreams, Event, Stream, streams_of
from alignedserve.runtime.engine.engine_options import NO_OWN_BLOCKS, EngineAbilities, EngineOptions, OwnBlocks
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.forward.forward_batch import LastTokenContexts, LastTokenPlanner
from alignedserve.runtime.engine.sampling.sampler import Sampler
from alignedserve.runtime.engine.steps.batch_builder import BatchBuilder
from alignedserve.runtime.engine.steps.drafts import Drafting
from alignedserve.runtime.engine.steps.hidden_cache import HiddenContexts
from alignedserve.runtime.engine.steps.next_step import BlockLoans, NextStep, RingKeeper
from alignedserve.runtime.engine.steps.step import (
    MASKS_FIRST_S,
    NO_TIMES,
    NO_TOKEN,
    ChosenTokens,
    Drafts,
    Forced,
    JumpAhead,
    LateStates,
    PromptLogprobs,
    Slices,
    StepBatch,
    StepLaunch,
    StepOutput,
    StepSlice,
    StepTimes,
    forced_counts,
    last_tokens,
    with_forced,
)
from alignedserve.runtime.engine.steps.step_passes import (
    Capture,
    CudaCapture,
    DecodeGraphs,
    PromptResults,
    StepPasses,
    graph_sizes,
)
from alignedserve.runtime.grammar.token_masks import TokenMasks
from alignedserve.runtime.kv.block_storage import BlockStorage


class RankMirror(Protocol):
    """The other ranks of a worker. They perform commands in order, and get them with the next `flush`."""

    def add_sequence(self, sequence: NewSequence) -> None:
        """Add the sequence, without a grammar: the other ranks sample nothing."""

    def append_blocks(self, request_id: RequestId, block_ids: Sequence[BlockId]) -> None:
        """Extend the sequence's block table."""

    def copy_blocks(self, sources: Sequence[BlockId]) -> None:
        """Read these blocks, for the next `write_copies`."""

    def write_copies(self, targets: Sequence[BlockId]) -> None:
        """Write what `copy_blocks` read."""

    def replace_block(self, request_id: RequestId, index: int, block_id: BlockId) -> None:
        """Let the sequence read this block in place of its own."""

    def remove_sequence(self, request_id: RequestId) -> None:
        """Forget the sequence."""

    def run_step(self, slices: Slices, forced: Forced, *, takes_highest: bool) -> None:
        """Compute these slices; `forced`: tokens that sequences get before, `takes_highest`: as in StepLaunch."""

    def set_tokens(self, token_ids: IntArray) -> None:
        """Take the tokens of the latest step, by its sampled rows; see NO_TOKEN."""

    def flush(self) -> None:
        """Send what was told. Raises ExchangeBroken when a rank has ended."""

    def wait_for(self, event: Event) -> None:
        """Wait until the first rank's device has come to the event, behind a step of all ranks. Raises ExchangeBroken
        when a rank has ended, or has not come for too long: the step's results mean nothing then."""


def wait_for_step(event: Event, ranks: RankMirror | None) -> None:
    """Wait until the device has come to the event behind a step. Raises ExchangeBroken as RankMirror.wait_for does.

    `ranks`: the others that compute it; None: there are none."""
    if ranks is None:
        event.synchronize()
    else:
        ranks.wait_for(event)


def read_whole(storage: BlockStorage, compute: Stream, block_ids: Sequence[BlockId]) -> Tensor:
    numbers, read = np.array(block_ids, np.int64), []
    storage.pending_copies.wait(compute, numbers)
    (rows,) = to_device([numbers], storage.device)
    compute.run(lambda: read.append(storage.bytes[rows]))
    storage.pending_copies.record(compute, numbers)
    return read[0]


def write_whole(storage: BlockStorage, compute: Stream, block_ids: Sequence[BlockId], content: Tensor) -> None:
    numbers = np.array(block_ids, np.int64)
    storage.pending_copies.wait(compute, numbers)
    (rows,) = to_device([numbers], storage.device)
    compute.run(lambda: storage.bytes.index_copy_(0, rows, content))
    storage.pending_copies.record(compute, numbers)


__all__ = ["Engine", "NewSequence", "PromptLogprobs", "StepOutput", "StepSlice", "StepTimes"]

MostDrafts = Mapping[RequestId, int]  # tokens that may be drafted of each sequence
NO_DRAFTS: MostDrafts = MappingProxyType({})
COMPUTE = "compute"  # the stream of forward passes


class Engine:
    """One model, its block storage and the sequences being computed.

    Single-threaded, without I/O, Ray or scheduling. A sequence holds its tokens so far and the number of computed ones.
    A slice computes the next ones and writes their keys and values into the sequence's blocks; a slice that reaches the
    last known token samples the next one, which is appended to the sequence. That rule covers whole and chunked
    prefill, decode, recompute after preemption and resuming from a copy of the blocks.

    Bad calls (unknown request, too few blocks, too many sequences or tokens) are broken invariants of the caller."""

    def __init__(
        self,
        *,
        model: Decoder,
        storage: BlockStorage,
        options: EngineOptions,
        own_blocks: OwnBlocks = NO_OWN_BLOCKS,
        streams: DeviceStreams | None = None,
        capture: Capture | None = None,
        masks: TokenMasks | None = None,
        ranks: RankMirror | None = None,
    ) -> None:
        """`streams`, `capture`: replace those of the storage's device. `masks`: empty; None: no sequence may have a
        grammar. `ranks`: the others that compute the model with this one, the first; None: it is computed here alone.
        Raises ConfigError for options that are unavailable here."""
        layout, config, device = storage.layout, model.config, storage.device
        _check_fit(model, layout, options)
        self.model = model
        self.storage = storage
        self._ranks = ranks
        self._table = SequenceTable(
            max_sequences=options.max_sequences,
            max_context_len=options.max_context_len,
            block_size=layout.block_size,
            hidden_block_tokens=options.hidden_block_tokens,
            state_blocks=layout.state_blocks,
        )
        self.keep_states = self._table.keep_states
        scratch = own_blocks.ring_scratch
        self._rings = rings = RingTables(self._table, layout, scratch) if layout.ring_layers else None
        storage.zero_blocks(np.array(scratch, np.int64))  # of which attention may read unused slots

        def make_planner(contexts: Contexts, storage: BlockStorage) -> AttentionPlanner:
            return attention_planner(options.attention, contexts, storage, config, model.dtype, model.scores, rings)

        planner = make_planner(self._table, storage)
        can = EngineAbilities.of(options, storage, planner, has_ranks=ranks is not None)
        self.can_share_blocks = can.shares_blocks
        hidden = last = None
        if options.hidden_block_tokens is not None:
            hidden = HiddenContexts(self._table, storage, options.hidden_block_tokens, make_planner)
        if device.type == "cpu" and not can.launches_ahead and not planner.plans_ahead:  # it plans no device's arrays
            contexts = LastTokenContexts(self._table)
            last = LastTokenPlanner(contexts, make_planner(contexts, storage))
        if capture is None and device.type == "cuda" and planner.plans_ahead:
            capture = CudaCapture()
        sizes = [] if capture is None else graph_sizes(options.most_running)
        graphs = None if capture is None else DecodeGraphs(model, storage, capture, sizes)
        self._passes = StepPasses(model, storage, graphs)
        self._builder = BatchBuilder(
            self._table, storage, planner, decode_sizes=sizes, hidden=hidden, last=last, rings=rings
        )
        self._sampler = Sampler(
            max_sequences=options.max_sequences,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            masks=masks,
            counts_on_device=can.launches_ahead or device.type != "cpu",
        )
        self._jumps = JumpAhead(self._table, masks, self._sampler)
        # A rejected draft would have changed states, and overwritten a ring.
        is_able = not (can.launches_ahead or layout.has_states or layout.ring_layers or ranks is not None)
        self._drafting = Drafting(
            self._table, self._sampler, masks, planner, end_token_ids=config.eos_token_ids, is_able=is_able
        )
        self._masks = masks
        self._prompts = PromptResults(model, self._table)
        self._compute = (streams or streams_of(device)).stream(COMPUTE)
        if can.launches_ahead and isinstance(planner, TableKeeper):
            planner.keep_tables()
        self._chosen = ChosenTokens(options.max_sequences, device, launches_ahead=can.launches_ahead)
        self._next = NextStep(
            self._table,
            self._builder,
            self._sampler,
            BlockLoans(self._table, storage, self._compute, own_blocks.lent),
            plans=can.plans_ahead,
            launches=can.launches_ahead,
            launches_chunks=can.launches_chunks,
            kept_rings=None if rings is None else RingKeeper(rings, storage, self._compute),
        )
        self._late = LateStates(self._table, storage) if layout.has_states else None
        self._enqueuing: StepLaunch | None = None  # between its layers others may come

    @property
    def may_draft(self) -> bool:
        """Whether a step can verify drafts."""
        return self._drafting.is_able

    @property
    def hidden_block_tokens(self) -> int | None:
        """Tokens whose layer inputs a block holds; None: this engine has no hidden caches."""
        return self._table.hidden_block_tokens

    def add_sequence(self, sequence: NewSequence) -> None:
        """Add a sequence. The caller keeps ownership of the blocks. Blocks that hold cached tokens must be written
        before the sequence's first slice, which clears the unused slots of the last of them. Full cached blocks may be
        shared with others, a partly filled one may not."""
        assert 0 <= min(sequence.token_ids) <= max(sequence.token_ids) < self.model.config.vocab_size, "unknown token"
        row = self._table.add(sequence)
        self._sampler.add(row, sequence)
        if self._late is not None:
            self._late.note(row)
        if self._ranks is not None:
            self._ranks.add_sequence(sequence)

    def append_blocks(self, request_id: RequestId, block_ids: Sequence[BlockId]) -> None:
        self._table.append_blocks(request_id, block_ids)
        if self._ranks is not None:
            self._ranks.append_blocks(request_id, block_ids)

    @torch.inference_mode()
    def read_blocks(self, block_ids: Sequence[BlockId]) -> Tensor:
        """Return the bytes of blocks behind all work that is enqueued."""
        if self._ranks is not None:
            self._ranks.copy_blocks(block_ids)
        return read_whole(self.storage, self._compute, block_ids)

    @torch.inference_mode()
    def write_blocks(self, block_ids: Sequence[BlockId], content: Tensor) -> None:
        """Write the bytes of the blocks that were read last into these, for sequences that are added next."""
        if self._ranks is not None:
            self._ranks.write_copies(block_ids)
        write_whole(self.storage, self._compute, block_ids, content)

    def replace_block(self, request_id: RequestId, index: int, block_id: BlockId) -> None:
        """Let a sequence read a full block that holds the same in place of its own, which the caller then owns."""
        self._table.replace_block(request_id, index, block_id)
        self._next.drop()  # it reads the old block, which may be overwritten from now on
        if self._ranks is not None:
            self._ranks.replace_block(request_id, index, block_id)

    def remove_sequence(self, request_id: RequestId) -> None:
        """Free the sequence's row. The caller frees or copies its blocks."""
        self._sampler.remove(self._table.remove(request_id))
        if self._ranks is not None:
            self._ranks.remove_sequence(request_id)

    def token_ids(self, request_id: RequestId) -> tuple[int, ...]:
        row = self._table.row(request_id)
        return tuple(self._table.tokens[row, : self._table.num_tokens[row]].tolist())

    def num_computed(self, request_id: RequestId) -> int:
        return int(self._table.num_computed[self._table.row(request_id)])

    def num_tokens(self, request_id: RequestId) -> int:
        return int(self._table.num_tokens[self._table.row(request_id)])

    @torch.inference_mode()
    def record_graphs(self, *, has_adapters: bool = False) -> None:
        """Record CUDA graphs for every batch size, if any, and compile the sampling kernels, before serving.

        `has_adapters`: sequences may have some: of such batches as well."""
        if self._passes.graphs is not None:
            self._passes.record_all(self._builder, self._compute, self._sampler, has_adapters=has_adapters)
            self._compute.record().synchronize()

    @in_inference_mode
    def execute(self, slices: Slices, *, may_go_on: bool = True, drafts: MostDrafts = NO_DRAFTS) -> StepOutput:
        """Run one step of at least one slice, one per sequence, each within its sequence's tokens and blocks. A slice
        is a StepSlice or an equal tuple. On a GPU the next step is launched behind this one, or prepared while it is
        computed, assuming that sequences continue to decode. A slice that decodes takes tokens along that a grammar
        forces. `may_go_on`: the device may be computing when this returns. `drafts`: how many tokens may be guessed of
        a sequence that decodes, and verified (steps/drafts.py). Called between two layers of a step
        (Decoder.stop_for), of other sequences, it runs before the rest of that."""
        started = time.perf_counter()
        slices, skipped = (slices, ()) if self._enqueuing is not None else self._without_unready(slices)
        slices = self._table.whole_slices(slices if self._late is None else self._late.caught_up(slices))
        if self._rings is not None:
            slices = self._rings.with_room(slices, self._compute_before)
        forced = self._jumps.take(slices)
        outer = self._enqueuing
        ahead, rest = self._next.take_launched(slices) if outer is None else (None, slices)
        if ahead is None and not rest:
            return StepOutput([], [], {}, [], NO_TIMES, skipped=skipped)
        may_draft = bool(drafts) and outer is None and ahead is None and not forced
        guessed = self._drafting.take(rest, drafts) if may_draft else None
        step = self._build(rest, guessed.token_ids if guessed is not None else forced) if rest else None
        prepared = time.perf_counter()
        launches, before = [] if ahead is None else [ahead], ahead if outer is None else outer
        if step is not None:
            first_place = 0 if before is None else before.end_place
            launches.append(self._launch(step, rest, forced, first_place=first_place, drafts=guessed))
        if outer is None and guessed is None:
            self._go_on(launches, may_launch=may_go_on and not self._table.has_runs_left)
        sampled, failed = self._collect(launches[0])
        for launch in launches[1:]:
            more, more_failed = self._collect(launch)
            sampled, failed = sampled + more, failed + more_failed
        times = launches[-1].times(self.model, started, prepared, is_ahead=ahead is not None)
        sampled, counts = with_forced(forced, sampled), forced_counts(forced, failed)
        drafted = () if guessed is None else guessed.counted()
        if drafted:
            counts = tuple((key, right) for key, _, right in drafted if right and key not in failed)
        prompt_logprobs = [part for launch in launches for part in launch.prompt_logprobs]
        return StepOutput(sampled, failed, self._reasons(failed), prompt_logprobs, times, counts, skipped, drafted)

    @property
    def may_stop(self) -> bool:
        """Whether others may run between layers of the step being enqueued, neither recorded nor launched ahead."""
        launch = self._enqueuing
        return launch is not None and launch.loans is None and not self._passes.may_record(launch.step)

    def settle(self) -> None:
        """Wait until the device has done what is launched, and drop the results of a step that nobody asked for."""
        self._next.drop()
        wait_for_step(self._compute.record(), self._ranks)

    # --- the parts of a step

    def _without_unready(self, slices: Slices) -> tuple[Slices, tuple[RequestId, ...]]:
        """Return the slices to compute, and the sequences that wait for the mask of a heavy grammar."""
        table, masks = self._table, self._masks
        if masks is None or not masks.has_heavy:
            return slices, ()
        decodes = ((table.row(request_id), request_id) for request_id, count in slices if count == 1)
        rows = {row: request_id for row, request_id in decodes if table.num_computed[row] + 1 == table.num_tokens[row]}
        unready = masks.unready(list(rows), len(slices))
        if not unready:
            return slices, ()
        skipped = tuple(rows[row] for row in sorted(unready))
        return [part for part in slices if part[0] not in skipped], skipped

    def _compute_before(self, request_id: RequestId, count: int) -> None:
        self._launch(self._builder.build([request_id], [count]), [(request_id, count)], {}, first_place=0)

    def _build(self, slices: Slices, forced: Forced) -> StepBatch:
        if not forced:
            return self._next.take_planned(slices) or self._builder.build_slices(slices)
        self._next.forget()
        return self._builder.build_slices(slices, forced)

    def _launch(
        self, step: StepBatch, slices: Slices, forced: Forced, *, first_place: int, drafts: Drafts | None = None
    ) -> StepLaunch:
        if drafts is not None:
            step = drafts.sampled_at(step)
        rows = step.sampled_rows
        num_tokens = self._table.num_tokens[rows] if drafts is None else step.positions[step.sampled_at] + 1
        launch = StepLaunch(step, num_tokens, first_place=first_place, drafts=drafts)
        launch.masks = self._sampler.start_masks(rows, num_tokens)
        if self.storage.device.type == "cpu":
            launch.await_masks(MASKS_FIRST_S)
        launch.takes_highest = self._takes_highest(launch)
        if self._ranks is not None:
            self._ranks.run_step(slices, forced, takes_highest=launch.takes_highest)
            self._ranks.flush()
        launch.changes = self._sampler.plan(rows, num_tokens)
        self._enqueue(launch)
        return launch

    def _enqueue(self, launch: StepLaunch) -> None:
        self._start(launch)
        self._table.num_computed[launch.step.rows] += launch.step.counts
        self._table.num_tokens[launch.rows] = launch.num_tokens + 1

    def _start(self, launch: StepLaunch) -> None:
        step = launch.step
        if not self.storage.pending_copies.is_idle:
            self.storage.pending_copies.wait(self._compute, partial(self._table.blocks_of, step.rows))
        outer, self._enqueuing = self._enqueuing, launch
        self._compute.run(partial(self._compute_step, launch))
        self._enqueuing = outer
        self.model.finish_step()
        launch.on_host = self._chosen.copy_out(self._compute, launch.places, is_within=outer is not None)
        launch.computed = self._compute.record()

    def _go_on(self, launches: list[StepLaunch], *, may_launch: bool) -> None:
        self._next.forget()
        ahead = self._next.after(launches) if may_launch else None
        if ahead is None:
            self._next.plan(launches)
            return
        ahead.takes_highest = self._takes_highest(ahead)
        ahead.changes = self._sampler.plan(ahead.step.sampled_rows, ahead.num_tokens)
        self._start(ahead)
        self.storage.pending_copies.record(self._compute, ahead.step.written_blocks(self.storage.slot_stride))
        self._next.keep(ahead)

    @in_inference_mode  # it may be called later, by a stream
    def _compute_step(self, launch: StepLaunch) -> None:
        step, rows = launch.step, launch.step.sampled_rows
        inputs = self._chosen.inputs(launch.inputs_at)
        highest = self._passes.highest(launch, inputs)
        if highest is not None:
            launch.forwarded = time.perf_counter()
            launch.draw = self._chosen.choose(self._sampler.start_with(rows, highest), launch.first_place)
            return
        hidden, logits = self._passes.logits(step, inputs)
        if self._next.launches and self._sampler.wants_logprobs(rows):
            logits = logits.clone()  # the next step may write its own there before these are looked at
        launch.forwarded = time.perf_counter()
        if step.wants_prompt_logprobs:
            logits = logits.clone()  # another pass may run meanwhile, and write its own there
            launch.prompt_logprobs = self._prompts.logprobs(step, hidden)
        if len(rows):
            masks = launch.await_masks()
            last = last_tokens(inputs, len(rows))
            draw = self._sampler.start(rows, launch.num_tokens, logits, masks, launch.changes, last)
            launch.draw = self._chosen.choose(draw, launch.first_place)
            launch.embeddings = self._prompts.embeddings(step, hidden)

    def _takes_highest(self, launch: StepLaunch) -> bool:
        step = launch.step
        if not self.model.has_native_head or not step.is_decode or step.needs_hidden:
            return False
        if launch.masks is not None and (self._ranks is not None or not launch.masks.done()):
            return False
        return self._sampler.wants_highest_alone(step.sampled_rows, launch.num_tokens)

    def _collect(self, launch: StepLaunch) -> tuple[list[SampledToken], list[RequestId]]:
        """Wait for the step's tokens and write them into the table. Returns them, and the sequences whose logits were
        not numbers."""
        wait_for_step(launch.computed, self._ranks)
        if launch.draw is None:
            return [], []
        assert launch.on_host is not None, "a step that was not launched"
        draw, token_ids = launch.draw, launch.on_host.numpy().copy()
        if launch.drafts is not None:
            launch.kept = launch.drafts.verify(self._table, launch.rows, token_ids)
        rows = launch.rows
        if launch.kept is not None:
            draw, token_ids = draw.only(launch.kept), token_ids[launch.kept]
        is_usable = token_ids != NO_TOKEN
        if self._ranks is not None:
            self._ranks.set_tokens(token_ids)
        logprobs, ids = self._sampler.finish(draw, token_ids, is_usable).logprobs, self._table.ids_of(rows)
        sampled = launch.sampled(ids, token_ids, logprobs)
        if self._table.note_tokens(rows, launch.num_tokens_before, token_ids, is_usable):
            return sampled, []
        self._next.forget()
        failed = [ids[index] for index in np.flatnonzero(~is_usable).tolist()]
        return [token for token in sampled if token.request_id not in failed], failed

    def _reasons(self, failed: list[RequestId]) -> dict[RequestId, tuple[FailureKind, str]]:
        reasons = ((request_id, self._sampler.failure(self._table.row(request_id))) for request_id in failed)
        return {request_id: reason for request_id, reason in reasons if reason is not None}


def _check_fit(model: Decoder, layout: BlockLayout, options: EngineOptions) -> None:
    config = model.config
    assert config.rope or options.max_context_len <= config.max_position_embeddings, "more context than positions"
    dtype = layout.dtype if layout.has_scales else model.dtype_name
    assert layout in config.layouts(layout.block_size, dtype), "the storage is not of this model"
    assert not (layout.has_scales and options.hidden_block_tokens), "blocks of 8 bits hold no layer inputs"
