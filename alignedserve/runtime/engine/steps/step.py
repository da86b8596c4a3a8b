"""One step: the slices that are asked for, its batch on the host, its launch on the compute stream, and its output."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SampledToken, TokenLogprob, sampled_tokens
from alignedserve.runtime.attention.backend import StepAttention
from alignedserve.runtime.attention.ring_tables import RingPlan
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.device.arrays import Array, to_device
from alignedserve.runtime.device.streams import Event, HostEvent
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.forward.forward_batch import ForwardBatch, LastTokens
from alignedserve.runtime.engine.sampling.logits_processors import LogitsChanges
from alignedserve.runtime.engine.sampling.sampler import Draw
from alignedserve.runtime.engine.steps.hidden_cache import HiddenPlan
from alignedserve.runtime.grammar.token_masks import StepMasks
from alignedserve.runtime.pictures import PictureRows
from kernels.cpu.decode_pass import AllowedTokens
from kernels.device_lora import DevicePlan
from kernels.lora import AdapterRows
from kernels.states.device_rows import DeviceStatePlan
from kernels.states.state_rows import StateRows


class StepBatch(NamedTuple):
    """A forward batch on the host, and the places of its results. Slices are in batch order: decodes, then chunks.

    The token rows of a batch of decodes may be padded to a size that has a CUDA graph.
    """

    token_ids: IntArray  # [token rows]
    positions: IntArray  # [token rows]
    slots: IntArray  # [token rows], see ForwardBatch
    fresh_blocks: IntArray  # see ForwardBatch
    unclean_tails: tuple[tuple[BlockId, int], ...]  # see ForwardBatch
    attention: StepAttention
    rows: IntArray  # [slices] rows of the sequence table
    counts: IntArray  # [slices] tokens of each
    first_rows: IntArray  # [slices] first token row of each
    sampled_rows: IntArray  # rows of the sequence table that reach their last known token
    sampled_at: IntArray  # the token rows whose logits they need, in the same order
    wants_prompt_logprobs: tuple[int, ...]  # slices that compute prompt tokens of sequences that asked
    wants_embeddings: IntArray  # places in sampled_rows of sequences that asked for their prompt's
    is_decode: bool  # one token of each slice, each the last known one, and keys and values in its blocks
    hidden: HiddenPlan | None = None  # of the last slices
    last: LastTokens | None = None  # of the sampled rows; None: the last layer computes all tokens to the end
    adapters: AdapterRows | DevicePlan | None = None  # of the token rows; None: no sequence has one
    places: Tensor | None = None  # see ForwardBatch; on the device already, as the next
    pictures: PictureRows | None = None  # on the device already; None: no token row has the embedding of one
    states: StateRows | DeviceStatePlan | None = None  # of the token rows; None: the model has none
    rings: RingPlan | None = None  # of the sequences; None: they have none

    @property
    def needs_hidden(self) -> bool:
        return bool(self.wants_prompt_logprobs) or len(self.wants_embeddings) > 0

    @property
    def num_tokens(self) -> int:
        return len(self.rows) if self.is_decode else int(self.counts.sum())

    def written_blocks(self, slot_stride: int) -> IntArray:
        count = self.num_tokens
        blocks = self.slots[:count] // slot_stride
        return blocks if self.rings is None else np.concatenate((blocks, self.rings.written_by(count, slot_stride)))

    @property
    def host_arrays(self) -> tuple[Array, ...]:
        arrays = () if self.hidden is None else self.hidden.arrays
        adapters = () if self.adapters is None else self.adapters.host_arrays
        states = () if self.states is None else self.states.host_arrays
        rings = () if self.rings is None else self.rings.host_arrays
        extra_arrays = (*adapters, *states, *rings, *arrays)
        return (self.token_ids, self.positions, self.slots, *extra_arrays, *self.attention.host_arrays)

    def to_forward_batch(self, tensors: Sequence[Tensor]) -> ForwardBatch:
        token_ids, positions, slots, *others = tensors
        hidden, adapters, states, rings = None, None, None, None
        if self.adapters is not None:
            num_arrays = len(self.adapters.host_arrays)
            adapters, others = self.adapters.bound(others[:num_arrays]), others[num_arrays:]
        if self.states is not None:
            num_arrays = len(self.states.host_arrays)
            states, others = self.states.bound(others[:num_arrays]), others[num_arrays:]
        if self.rings is not None:
            num_arrays = len(self.rings.host_arrays)
            rings, others = self.rings.bound(others[:num_arrays]), others[num_arrays:]
        if self.hidden is not None:
            num_arrays = len(self.hidden.arrays)
            hidden, others = self.hidden.to_rows(len(token_ids), others[:num_arrays]), others[num_arrays:]
        self.attention.bind(others)
        last = None if self.last is None else self.last.to_rows()
        rest = (self.fresh_blocks, self.unclean_tails, self.attention, hidden, last, adapters)
        return ForwardBatch(token_ids, positions, slots, *rest, self.places, self.pictures, states, rings)

    def forward_batch(self, device: torch.device, inputs: Tensor | None = None) -> ForwardBatch:
        """Bring the arrays to the device and build the forward batch. `inputs`: its first tokens, on the device."""
        tensors = to_device(self.host_arrays, device)
        if inputs is not None:
            tensors[0][: len(inputs)] = inputs
        return self.to_forward_batch(tensors)


Slices = Sequence[tuple[RequestId, int]]  # `StepSlice`s, or equal tuples
Forced = dict[RequestId, tuple[int, ...]]  # tokens that a grammar leaves no choice of, by sequence


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
    """The parts of one step's time, in seconds."""

    prepare_s: float
    forward_s: float  # the pass and its logits
    sampling_s: float  # and the log-probabilities of prompt tokens
    attention_s: float  # of the pass, as Decoder.attention_s
    chunk_attention_s: float  # likewise
    padded_share: float  # of attention_s, see StepAttention
    grammar_s: float = 0.0  # of all parts: waiting for masks
    is_ahead: bool = False  # its decodes were launched before the tokens of the step before were known


NO_TIMES = StepTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of one step."""

    # Of every sequence whose slice reached its last known token, in any order, behind forced tokens.
    sampled: list[SampledToken]
    failed: list[RequestId]  # no token: their logits were not numbers, or see `reasons`; remove them
    reasons: dict[RequestId, tuple[FailureKind, str]]  # of those that failed: why no token can follow
    prompt_logprobs: list[PromptLogprobs]
    times: StepTimes
    forced: tuple[tuple[RequestId, int], ...] = ()  # how many tokens of a sequence in `sampled` its grammar forced
    skipped: tuple[RequestId, ...] = ()  # sequences whose slices were not computed: their grammars' masks lack


# On a CPU, masks and forward pass have the same cores: masks beside the pass delay one of its threads, and so all of
# them. Where masks take longer, the pass begins without them.
MASKS_FIRST_S = 0.02


class LentBlocks(NamedTuple):
    """Blocks of the engine that one step writes where its sequences lack blocks."""

    rows: IntArray  # of the sequence table
    columns: IntArray  # of their block tables
    blocks: IntArray


@dataclass(slots=True)
class StepLaunch:
    """A step on the compute stream."""

    step: StepBatch
    num_tokens: IntArray  # of each sampled row, before the step
    computed: Event = field(default_factory=HostEvent)  # its tokens are on the host then
    masks: "Future[StepMasks] | None" = None  # of its sampled rows; None: no row has a grammar
    changes: LogitsChanges | None = None  # in the logits of its sampled rows; None: there are none
    grammar_s: float = 0.0  # that the step has waited for its masks
    first_place: int = 0  # of its tokens among those that are chosen on the device
    # Of a step that was launched ahead: the places, among the tokens that the step before it chose on the device, of
    # those that are its inputs in the order of its rows; and which of its own sampled rows were asked for.
    inputs_at: IntArray | None = None
    kept: IntArray | None = None
    loans: LentBlocks | None = None  # blocks of the engine's that it writes; None: of its sequences alone
    on_host: Tensor | None = None  # the tokens of its sampled rows, once it is computed
    takes_highest: bool = False  # the highest logits of its rows are all that is asked for
    draw: Draw | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    embeddings: dict[int, bytes] = field(default_factory=dict)  # by place among the sampled rows
    forwarded: float = 0.0  # time at which the forward pass was computed, or enqueued

    def await_masks(self, at_most_s: float | None = None) -> StepMasks | None:
        """Wait for the masks up to the limit, and note the time; None: no row has a grammar, or not yet."""
        if self.masks is None:
            return None
        began = time.perf_counter()
        wait((self.masks,), at_most_s)
        self.grammar_s += time.perf_counter() - began
        return self.masks.result() if self.masks.done() else None

    def allowed_tokens(self) -> AllowedTokens | None:
        """Return the masks, which are there, in the form that a pass takes whose rows are all sampled; None: none."""
        if self.masks is None:
            return None
        masks, places = self.masks.result(), np.full(len(self.step.rows), -1, np.int64)
        places[masks.at] = np.arange(len(masks.at))
        return AllowedTokens(torch.from_numpy(places), torch.from_numpy(masks.bits))

    def sampled(
        self, request_ids: Sequence[RequestId], token_ids: IntArray, logprobs: Mapping[int, TokenLogprob]
    ) -> list[SampledToken]:
        tokens = sampled_tokens(request_ids, token_ids.tolist())
        for index in {*logprobs, *self.embeddings} if logprobs or self.embeddings else ():
            more = logprobs.get(index), self.embeddings.get(index, b"")
            tokens[index] = SampledToken(request_ids[index], tokens[index].token_id, *more)
        return tokens

    def times(self, model: Decoder, started: float, prepared: float, *, is_ahead: bool) -> StepTimes:
        now = time.perf_counter()
        forwarded = self.forwarded if model.device.type == "cpu" else now
        return StepTimes(
            prepare_s=prepared - started,
            forward_s=forwarded - prepared,
            sampling_s=now - forwarded,
            attention_s=model.attention_s,
            chunk_attention_s=model.chunk_attention_s,
            padded_share=self.step.attention.padded_share,
            grammar_s=self.grammar_s,
            is_ahead=is_ahead,
        )

    @property
    def rows(self) -> IntArray:
        rows = self.step.sampled_rows
        return rows if self.kept is None else rows[self.kept]

    @property
    def places(self) -> slice:
        return slice(self.first_place, self.end_place)

    @property
    def end_place(self) -> int:
        return self.first_place + len(self.step.sampled_rows)

    @property
    def num_tokens_before(self) -> IntArray:
        return self.num_tokens if self.kept is None else self.num_tokens[self.kept]
