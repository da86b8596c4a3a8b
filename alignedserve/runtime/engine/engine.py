"""Computes tokens: one forward pass and one sampling step per call, for any mixture of sequences."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.block_layout import INT8
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SampledToken, TokenLogprob
from alignedserve.runtime.attention.backend import AUTO, AttentionPlanner, Contexts
from alignedserve.runtime.attention.registry import attention_planner
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence, SequenceTable
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import DeviceStreams, Event, HostEvent, streams_of
from alignedserve.runtime.engine.cuda_graphs import Capture, CudaCapture, DecodeGraphs, graph_sizes
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.hidden_cache import HiddenContexts
from alignedserve.runtime.engine.last_tokens import LastTokenContexts, LastTokenPlanner
from alignedserve.runtime.engine.sampler import Draw, Sampler, logprob_entries
from alignedserve.runtime.engine.step_batch import BatchBuilder, StepBatch
from alignedserve.runtime.engine.step_output import PromptLogprobs, StepOutput, StepSlice, StepTimes
from alignedserve.runtime.grammar.token_masks import StepMasks, TokenMasks
from alignedserve.runtime.kv.block_storage import BlockStorage
from kernels.cpu.decode_pass import HighestLogits

__all__ = ["Engine", "NewSequence", "PromptLogprobs", "StepOutput", "StepSlice", "StepTimes"]

# Logits of this many prompt tokens are held at a time for prompt logprobs.
_PROMPT_LOGPROB_ROWS = 64

COMPUTE = "compute"  # the stream of forward passes
# In place of a token where logits were not numbers.
_NO_TOKEN = -1


@dataclass(slots=True)
class _Launch:
    """A step on the compute stream."""

    step: StepBatch
    num_tokens: IntArray  # of each sampled row, before the step
    computed: Event = field(default_factory=HostEvent)  # its tokens are on the host then
    masks: "Future[StepMasks] | None" = None  # of its sampled rows; None: no row has a grammar
    draw: Draw | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    embeddings: dict[int, bytes] = field(default_factory=dict)  # by place among the sampled rows
    forwarded: float = 0.0  # time at which the forward pass was computed, or enqueued


class Engine:
    """One model, its block storage and the sequences being computed.

    Single-threaded, without I/O, Ray or scheduling. A sequence holds its tokens so far and the number of computed ones.
    A slice computes the next ones and writes their keys and values into the sequence's blocks; a slice that reaches the
    last known token samples the next one, which is appended to the sequence. That rule covers whole and chunked
    prefill, decode, recompute after preemption and resuming from a copy of the blocks.

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
        streams: DeviceStreams | None = None,
        capture: Capture | None = None,
        hidden_block_tokens: int | None = None,
        masks: TokenMasks | None = None,
    ) -> None:
        """`attention`: one of CHOICES of runtime.attention. `streams`, `capture`: replace those of the storage's
        device. `hidden_block_tokens`: sequences may have a hidden cache, whose blocks hold so many tokens each; memory
        is allocated for it. `masks`: empty; None: no sequence may have a grammar.

        Raises ConfigError for options that are unavailable here.
        """
        layout, config = storage.layout, model.config
        assert config.rope is not None or max_context_len <= config.max_position_embeddings, (
            "more context than positions"
        )
        dtype = INT8 if layout.is_int8 else model.dtype_name
        assert layout == config.block_layout(layout.block_size, dtype), "the storage is not of this model"
        assert not (layout.is_int8 and hidden_block_tokens), "blocks of int8 hold no layer inputs"
        self.model = model
        self.storage = storage
        self._table = SequenceTable(
            max_sequences=max_sequences,
            max_context_len=max_context_len,
            block_size=layout.block_size,
            hidden_block_tokens=hidden_block_tokens,
        )

        def make_planner(contexts: Contexts, storage: BlockStorage) -> AttentionPlanner:
            return attention_planner(attention, contexts, storage, config, model.dtype)

        planner, hidden = make_planner(self._table, storage), None
        if hidden_block_tokens is not None:
            hidden = HiddenContexts(self._table, storage, hidden_block_tokens, make_planner)
        if capture is None and storage.device.type == "cuda" and planner.plans_ahead:
            capture = CudaCapture()
        last = None
        if storage.device.type == "cpu" and not planner.plans_ahead:  # its plans need no arrays on a device
            contexts = LastTokenContexts(self._table)
            last = LastTokenPlanner(contexts, make_planner(contexts, storage))
        sizes = graph_sizes(max_sequences)
        self._graphs = None if capture is None else DecodeGraphs(model, storage, capture, sizes)
        self._builder = BatchBuilder(
            self._table, storage, planner, decode_sizes=() if capture is None else sizes, hidden=hidden, last=last
        )
        self._sampler = Sampler(
            max_sequences=max_sequences, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids, masks=masks
        )
        self._compute = (streams or streams_of(storage.device)).stream(COMPUTE)
        self._chosen = torch.zeros(max_sequences, dtype=torch.int64, device=storage.device)
        self._no_token = torch.tensor(_NO_TOKEN, device=storage.device)
        is_here = storage.device.type == "cpu"
        self._chosen_on_host = self._chosen if is_here else torch.zeros(max_sequences, dtype=torch.int64).pin_memory()
        self._plans_ahead = planner.plans_ahead
        # Else a new block is zeroed first, and with it what another sequence has there.
        self.can_share_blocks = not planner.reads_unused_slots
        self._next_step: StepBatch | None = None
        self._next_version = 0

    @property
    def hidden_block_tokens(self) -> int | None:
        """Tokens whose layer inputs a block holds; None: this engine has no hidden caches."""
        return self._table.hidden_block_tokens

    def add_sequence(self, sequence: NewSequence) -> None:
        """Add a sequence. The caller keeps ownership of the blocks.

        Blocks that hold cached tokens must be written before the sequence's first slice, which clears the unused slots
        of the last of them. Full cached blocks may be shared with others, a partly filled one may not.
        """
        assert 0 <= min(sequence.token_ids) <= max(sequence.token_ids) < self.model.config.vocab_size, "unknown token"
        row = self._table.add(sequence)
        self._sampler.add(row, sequence)

    def append_blocks(self, request_id: RequestId, block_ids: Sequence[BlockId]) -> None:
        """Extend the sequence's block table."""
        self._table.append_blocks(request_id, block_ids)

    @torch.inference_mode()
    def read_blocks(self, block_ids: Sequence[BlockId]) -> Tensor:
        """Return the bytes of these blocks, as work enqueued so far leaves them."""
        numbers, read = np.array(block_ids, np.int64), []
        self.storage.pending_copies.wait(self._compute, numbers)
        (rows,) = to_device([numbers], self.storage.device)
        self._compute.run(lambda: read.append(self.storage.bytes[rows]))
        self.storage.pending_copies.record(self._compute, numbers)
        return read[0]

    @torch.inference_mode()
    def write_blocks(self, block_ids: Sequence[BlockId], content: Tensor) -> None:
        """Write the bytes of other blocks into these, for sequences that are added next."""
        numbers = np.array(block_ids, np.int64)
        self.storage.pending_copies.wait(self._compute, numbers)
        (rows,) = to_device([numbers], self.storage.device)
        self._compute.run(lambda: self.storage.bytes.index_copy_(0, rows, content))

    def replace_block(self, request_id: RequestId, place: int, block_id: BlockId) -> None:
        """Let a sequence read a full block that holds the same in place of its own, which the caller then owns."""
        self._table.replace_block(request_id, place, block_id)

    def remove_sequence(self, request_id: RequestId) -> None:
        """Free the sequence's row. The caller frees or copies its blocks."""
        self._sampler.remove(self._table.remove(request_id))

    def token_ids(self, request_id: RequestId) -> tuple[int, ...]:
        """Return prompt and generated tokens so far."""
        row = self._table.row(request_id)
        return tuple(self._table.tokens[row, : self._table.num_tokens[row]].tolist())

    def num_computed(self, request_id: RequestId) -> int:
        """Return the number of leading tokens whose keys and values lie in the blocks."""
        return int(self._table.num_computed[self._table.row(request_id)])

    def num_tokens(self, request_id: RequestId) -> int:
        """Return the number of tokens known so far."""
        return int(self._table.num_tokens[self._table.row(request_id)])

    @torch.inference_mode()
    def record_graphs(self) -> None:
        """Record CUDA graphs for every batch size, if any, and compile the sampling kernels, before serving."""
        if self._graphs is not None:
            for size in reversed(self._graphs.sizes):  # the largest allocates the memory that all use
                self._compute.run(partial(self._forward, self._builder.build_padding(size)))
            logits = torch.zeros((1, self.model.config.vocab_size), dtype=self.model.dtype, device=self.storage.device)
            self._compute.run(partial(self._sampler.warm_up, logits))
            self._compute.record().synchronize()

    @torch.inference_mode()
    def execute(self, slices: Sequence[tuple[RequestId, int]]) -> StepOutput:
        """Run one step of at least one slice, one per sequence, each within its sequence's tokens and blocks.

        A slice is a StepSlice or an equal tuple. On a GPU the next step is prepared while this one is computed,
        assuming that all sequences continue to decode.
        """
        started = time.perf_counter()
        step = self._take_prepared(slices) or self._builder.build(
            [part[0] for part in slices], [part[1] for part in slices]
        )
        prepared = time.perf_counter()
        launch = self._launch(step)
        self._prepare_next(step)
        launch.computed.synchronize()
        sampled, failed = self._collect(launch)
        del launch.draw  # freeing a megabyte takes time as well, and belongs to the step
        forwarded = launch.forwarded if self.storage.device.type == "cpu" else time.perf_counter()
        times = StepTimes(
            prepare_s=prepared - started,
            forward_s=forwarded - prepared,
            sampling_s=time.perf_counter() - forwarded,
            attention_s=self.model.attention_s,
            chunk_attention_s=self.model.chunk_attention_s,
            padded_share=step.attention.padded_share,
        )
        return StepOutput(sampled, failed, self._reasons(failed), launch.prompt_logprobs, times)

    # --- the parts of a step

    def _launch(self, step: StepBatch) -> "_Launch":
        """Enqueue the step on the compute stream and update the table to the state after it, except for the tokens."""
        table, rows = self._table, step.sampled_rows
        num_tokens = table.num_tokens[rows]
        launch = _Launch(step, num_tokens, masks=self._sampler.start_masks(rows, num_tokens))
        if not self.storage.pending_copies.is_idle:
            self.storage.pending_copies.wait(self._compute, table.blocks_of(step.rows))
        self._compute.run(lambda: self._compute_step(launch))
        if len(rows) and self._chosen_on_host is not self._chosen:
            self._compute.copy_out(self._chosen[: len(rows)], self._chosen_on_host[: len(rows)])
        launch.computed = self._compute.record()
        table.num_computed[step.rows] += step.counts
        table.num_tokens[rows] = num_tokens + 1
        return launch

    def _compute_step(self, launch: "_Launch") -> None:
        step, rows = launch.step, launch.step.sampled_rows
        highest = self._highest(launch)
        if highest is not None:
            launch.forwarded = time.perf_counter()
            self._choose(launch, self._sampler.start_with(rows, highest))
            return
        hidden, logits = self._forward(step)
        launch.forwarded = time.perf_counter()
        if len(rows):
            masks = None if launch.masks is None else launch.masks.result()
            self._choose(launch, self._sampler.start(rows, launch.num_tokens, logits, masks))
            launch.embeddings = self._embeddings(step, hidden)
        launch.prompt_logprobs = [self._prompt_logprobs(step, index, hidden) for index in step.wants_prompt_logprobs]

    def _choose(self, launch: "_Launch", draw: Draw) -> None:
        torch.where(draw.is_usable, draw.token_ids, self._no_token, out=self._chosen[: len(draw.rows)])
        launch.draw = draw

    def _highest(self, launch: "_Launch") -> HighestLogits | None:
        """Run the forward pass if the step's sequences take their highest logits and the pass finds these alone."""
        step = launch.step
        if not self.model.has_native_head or not step.is_decode or step.needs_hidden:
            return None
        if launch.masks is not None or not self._sampler.wants_highest_alone(step.sampled_rows, launch.num_tokens):
            return None
        return self.model.decode_highest(step.forward_batch(self.storage.device), self.storage)

    def _forward(self, step: StepBatch) -> tuple[Tensor, Tensor]:
        """Return last hidden vectors of all tokens, and the logits of the sampled ones."""
        if self._graphs is not None and step.is_decode and not step.needs_hidden:
            logits = self._graphs.run(step)
            if logits is not None:
                return logits[:0], logits[: len(step.rows)]
        batch = step.forward_batch(self.storage.device)
        if step.is_decode and not step.needs_hidden:
            logits = self.model.decode(batch, self.storage)
            if logits is not None:
                return logits[:0], logits
        hidden = self.model.forward(batch, self.storage)
        if not len(step.sampled_at):
            return hidden, hidden[:0]
        if len(step.sampled_at) == len(hidden):  # all of them: the places ascend
            return hidden, self.model.logits(hidden)
        (sampled_at,) = to_device([step.sampled_at], self.storage.device)
        return hidden, self.model.logits(hidden[sampled_at])

    def _collect(self, launch: "_Launch") -> tuple[list[SampledToken], list[RequestId]]:
        """Write the computed tokens into the table; return them and the sequences whose logits were not numbers."""
        if launch.draw is None:
            return [], []
        table, rows, places = self._table, launch.step.sampled_rows, launch.num_tokens
        token_ids = self._chosen_on_host[: len(rows)].numpy().copy()
        is_usable = token_ids != _NO_TOKEN
        choice = self._sampler.finish(launch.draw, token_ids, is_usable)
        request_ids = table.request_ids
        ids = [request_ids[row] for row in rows.tolist()]
        logprobs = choice.logprobs
        sampled = [
            SampledToken(request_id, token_id, logprobs.get(index), launch.embeddings.get(index, b""))
            for index, (request_id, token_id) in enumerate(zip(ids, token_ids.tolist(), strict=True))
        ]
        if is_usable.all():
            table.tokens[rows, places] = token_ids
            return sampled, []
        table.tokens[rows[is_usable], places[is_usable]] = token_ids[is_usable]
        table.num_tokens[rows[~is_usable]] -= 1
        self._next_step = None
        good, bad = np.flatnonzero(is_usable).tolist(), np.flatnonzero(~is_usable).tolist()
        return [sampled[index] for index in good], [ids[index] for index in bad]

    def _reasons(self, failed: list[RequestId]) -> dict[RequestId, str]:
        found = {request_id: self._sampler.failure(self._table.row(request_id)) for request_id in failed}
        return {request_id: reason for request_id, reason in found.items() if reason is not None}

    # --- the step after this one

    def _prepare_next(self, step: StepBatch) -> None:
        """Plan one more token of every sequence of the step; `_take_prepared` fills in the tokens and new blocks."""
        self._next_step = None
        table, rows = self._table, step.rows
        all_decode = len(step.sampled_rows) == len(rows)
        if not self._plans_ahead or not all_decode or step.hidden is not None:
            return
        if (table.num_computed[rows] < table.max_context_len).all():
            self._next_step = self._builder.build_decodes(rows)
            self._next_version = table.version

    def _take_prepared(self, slices: Sequence[tuple[RequestId, int]]) -> StepBatch | None:
        """Return the prepared step if it consists of these slices; else None."""
        step, table = self._next_step, self._table
        if step is None or self._next_version != table.version or len(slices) != len(step.rows):
            return None
        if any(part[1] != 1 for part in slices):
            return None
        rows = table.rows([part[0] for part in slices])
        if not np.array_equal(np.sort(rows), np.sort(step.rows)):
            return None
        self._builder.complete(step)
        return step

    def _embeddings(self, step: StepBatch, hidden: Tensor) -> dict[int, bytes]:
        """Return the output vectors of the prompts whose embeddings are asked for, by place among the sampled rows."""
        if not len(step.wants_embeddings):
            return {}
        places = step.wants_embeddings if step.last is not None else step.sampled_at[step.wants_embeddings]
        (at,) = to_device([places], hidden.device)
        vectors = self.model.outputs(hidden[at]).float().cpu().numpy()
        return {int(place): vector.tobytes() for place, vector in zip(step.wants_embeddings, vectors, strict=True)}

    def _prompt_logprobs(self, step: StepBatch, index: int, hidden: Tensor) -> PromptLogprobs:
        """Return log-probabilities of the prompt tokens that follow the tokens of slice `index`."""
        row, first_row = int(step.rows[index]), int(step.first_rows[index])
        sequence = self._table.sequence(row)
        first = int(step.positions[first_row]) + 1
        last_computed = first + int(step.counts[index]) - 1
        count = min(last_computed + 1, sequence.prompt_len) - first
        targets = torch.from_numpy(self._table.tokens[row, first : first + count].astype(np.int64)).to(hidden.device)
        num_top = sequence.sampling.num_prompt_logprobs or 0
        entries: list[TokenLogprob] = []
        for start in range(0, count, _PROMPT_LOGPROB_ROWS):
            stop = min(start + _PROMPT_LOGPROB_ROWS, count)
            logits = self.model.logits(hidden[first_row + start : first_row + stop])
            entries += logprob_entries(logits.float(), targets[start:stop], [num_top] * (stop - start))
        return PromptLogprobs(sequence.request_id, first, tuple(entries))
