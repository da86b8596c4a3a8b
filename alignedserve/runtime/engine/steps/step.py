"""One step: the slices that are asked for, its batch on the host, its launch on the compute stream, and its output.

The tokens that steps choose, on the device and on their way to the host, and tokens that grammars force.

Plans where the sequences of a step read their states, and where they leave them: see `kernels.states.state_rows`."""

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from alignedserve.core.errors import ConfigError, FailureKind
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SampledToken, TokenLogprob, sampled_tokens
from alignedserve.runtime.attention.backend import StepAttention
from alignedserve.runtime.attention.ring_tables import RingPlan
from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable, are_same, tokens_of
from alignedserve.runtime.device.arrays import Array, to_device
from alignedserve.runtime.device.streams import Event, HostEvent, Stream
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.forward.forward_batch import ForwardBatch, LastTokens
from alignedserve.runtime.engine.sampling.logits_processors import LogitsChanges
from alignedserve.runtime.engine.sampling.sampler import Draw, Sampler
from alignedserve.runtime.engine.steps.hidden_cache import HiddenPlan
from alignedserve.runtime.grammar.token_masks import StepMasks, TokenMasks
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.state_headers import tokens_behind_states
from alignedserve.runtime.pictures import PictureRows
from kernels.cpu.decode_pass import AllowedTokens
from kernels.lora import AdapterRows, DevicePlan
from kernels.states.state_rows import NO_BLOCK, DeviceStatePlan, StateColumn, StateParts, StateRows, state_kernels


class StepBatch(NamedTuple):
    """A forward batch on the host, and the places of its results. Slices are in batch order: decodes, then chunks. The
    token rows of a batch of decodes may be padded to a size that has a CUDA graph."""

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

    # Of every sequence whose slice reached its last known token, in any order, behind forced tokens and right drafts.
    sampled: list[SampledToken]
    failed: list[RequestId]  # no token: their logits were not numbers, or see `reasons`; remove them
    reasons: dict[RequestId, tuple[FailureKind, str]]  # of those that failed: why no token can follow
    prompt_logprobs: list[PromptLogprobs]
    times: StepTimes
    # How many tokens of a sequence in `sampled` its grammar forced, or were drafted.
    forced: tuple[tuple[RequestId, int], ...] = ()
    skipped: tuple[RequestId, ...] = ()  # sequences whose slices were not computed: their grammars' masks lack
    drafted: tuple[tuple[RequestId, int, int], ...] = ()  # tokens drafted of a sequence, and right ones


# On a CPU, masks and forward pass have the same cores: masks beside the pass delay one of its threads, and so all of
# them. Where masks take longer, the pass begins without them.
MASKS_FIRST_S = 0.02


class DraftedRow(NamedTuple):
    """A sequence with drafts in a step: guesses of its next tokens."""

    request_id: RequestId
    row: int  # of the sequence table
    num_tokens: int  # known before the drafts
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Drafts:
    """The drafts of one step, and how many of each sequence were right."""

    rows: list[DraftedRow]
    num_accepted: dict[RequestId, int]

    @property
    def token_ids(self) -> dict[RequestId, tuple[int, ...]]:
        return {part.request_id: part.token_ids for part in self.rows}

    def sampled_at(self, step: StepBatch) -> StepBatch:
        """Return the step with logits of every place that has a draft before or behind it."""
        rows = {part.row for part in self.rows}
        ends = step.first_rows + step.counts
        begins = np.where(np.isin(step.rows, list(rows)), step.first_rows, ends - 1)
        at = np.concatenate([np.arange(*place) for place in zip(begins.tolist(), ends.tolist(), strict=True)])
        return step._replace(sampled_rows=np.repeat(step.rows, ends - begins), sampled_at=at)

    def verify(self, table: SequenceTable, rows: IntArray, token_ids: IntArray) -> IntArray:
        """Note in the table how far drafts were right; return the places of the tokens that count, among these chosen
        for `rows`."""
        counts = np.ones(len(rows), np.bool_)
        for part in self.rows:
            first, num_drafts = int(np.flatnonzero(rows == part.row)[0]), len(part.token_ids)
            wrong = np.flatnonzero(token_ids[first : first + num_drafts] != np.array(part.token_ids))
            num_right = int(wrong[0]) if len(wrong) else num_drafts
            counts[first + num_right + 1 : first + num_drafts + 1] = False
            self.num_accepted[part.request_id] = num_right
            table.num_computed[part.row] = part.num_tokens + num_right
            table.num_tokens[part.row] = part.num_tokens + num_right + 1
        return np.flatnonzero(counts)

    def counted(self) -> tuple[tuple[RequestId, int, int], ...]:
        """Return drafts and right ones of each sequence."""
        return tuple((part.request_id, len(part.token_ids), self.num_accepted[part.request_id]) for part in self.rows)


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
    drafts: Drafts | None = None
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


NO_TOKEN = -1  # in place of a token where logits were not numbers
_NUM_PARTS = 2  # a step may be divided into so many launches
# Forced or drafted, of all sequences in one step: the rest of the step waits for them.
MOST_MORE_TOKENS = 128


class ChosenTokens:
    """The tokens of the step that was enqueued last, in the places that its launches have for their sampled rows."""

    def __init__(self, max_sequences: int, device: torch.device, *, launches_ahead: bool) -> None:
        """`launches_ahead`: a step may be enqueued before the host has read the tokens of the one before."""
        num_places = _NUM_PARTS * max_sequences + MOST_MORE_TOKENS  # a token is chosen behind each draft as well
        self._tokens = torch.zeros(num_places, dtype=torch.int64, device=device)
        self._ascending = np.arange(num_places)
        self._no_token = torch.tensor(NO_TOKEN, device=device)
        # One for each launch of a step and for the step behind it; none where the device is the host, which has read
        # them before the next.
        needs_copies = device.type != "cpu" or launches_ahead
        num_copies = _NUM_PARTS + 1 if needs_copies else 0
        self._on_host = deque(_like(self._tokens[:max_sequences]) for _ in range(num_copies))
        # Of a step within another, which is waited for before there is one more.
        self._within_on_host = _like(self._tokens[:max_sequences]) if needs_copies else None

    def choose(self, draw: Draw, first: int) -> Draw:
        """Take what was drawn in places from `first` on, and return it; for the compute stream."""
        places = slice(first, first + len(draw.rows))
        torch.where(draw.is_usable, draw.token_ids, self._no_token, out=self._tokens[places])
        return draw

    def inputs(self, places: IntArray | None) -> Tensor | None:
        """Return the tokens at these places, for the next step; None: it has its own. For the compute stream."""
        if places is None:
            return None
        if are_same(places, self._ascending[: len(places)]):  # as in most steps
            return self._tokens[: len(places)].clamp(min=0)
        (at,) = to_device([places], self._tokens.device)
        return self._tokens.index_select(0, at).clamp_(min=0)  # a sequence without a token ends

    def copy_out(self, stream: Stream, places: slice, *, is_within: bool = False) -> Tensor:
        """Enqueue the copy of tokens to the host; return where they will be, until the step after next.

        `is_within`: of a step between two layers of another, until the next such one."""
        tokens = self._tokens[places]
        if not len(tokens) or self._within_on_host is None:
            return tokens
        if not is_within:
            self._on_host.rotate()
        on_host = (self._within_on_host if is_within else self._on_host[0])[: len(tokens)]
        stream.copy_out(tokens, on_host)
        return on_host


def last_tokens(inputs: Tensor | None, count: int) -> Tensor | None:
    """Return the last tokens of so many sampled rows, the first of which decode from these `inputs`. NO_TOKEN: it is in
    the table, as of prompts that end beside decodes; None: so are all."""
    if inputs is None or inputs.shape[0] >= count:
        return inputs
    return pad(inputs, (0, count - inputs.shape[0]), value=NO_TOKEN)


def _like(tokens: Tensor) -> Tensor:
    on_host = torch.zeros(tokens.shape, dtype=tokens.dtype)
    return on_host if tokens.device.type == "cpu" else on_host.pin_memory()


class JumpAhead:
    """Appends tokens that grammars force to sequences that are about to decode: one step computes them together. Single
    steps would choose the same tokens. They take the slots that are left in a sequence's blocks, and so nobody
    allocates for them, or knows of them before the step has ended."""

    def __init__(self, table: SequenceTable, masks: TokenMasks | None, sampler: Sampler) -> None:
        self._table = table
        self._masks = masks
        self._sampler = sampler

    def take(self, slices: Slices) -> Forced:
        if self._masks is None or not self._masks.may_force:
            return {}
        forced: Forced = {}
        num_left = MOST_MORE_TOKENS
        for request_id, num_tokens in slices:
            token_ids = self._take(request_id, num_left) if num_tokens == 1 else ()
            if token_ids:
                forced[request_id] = token_ids
                num_left -= len(token_ids)
        return forced

    def _take(self, request_id: RequestId, at_most: int) -> tuple[int, ...]:
        assert self._masks is not None, "nothing is forced without masks"
        table, row = self._table, self._table.row(request_id)
        count = int(table.num_tokens[row])
        token_ids = self._masks.take_forced(row, min(at_most, table.space(row)))
        if token_ids:
            table.tokens[row, count : count + len(token_ids)] = token_ids
            table.num_tokens[row] = count + len(token_ids)
            self._sampler.record(row, token_ids)
        return token_ids


def forced_counts(forced: Forced, failed: Collection[RequestId]) -> tuple[tuple[RequestId, int], ...]:
    return tuple([(request_id, len(token_ids)) for request_id, token_ids in forced.items() if request_id not in failed])


def with_forced(forced: Forced, sampled: list[SampledToken]) -> list[SampledToken]:
    if not forced:
        return sampled
    tokens: list[SampledToken] = []
    for token in sampled:
        tokens += [SampledToken(token.request_id, token_id) for token_id in forced.get(token.request_id, ())]
        tokens.append(token)
    return tokens


class StatePlanner:
    """Plans the states of the passes over one storage."""

    def __init__(self, table: SequenceTable, storage: BlockStorage) -> None:
        """Raises ConfigError where nothing computes states on the storage's device."""
        self._table, self._storage = table, storage
        self._kernels = state_kernels(storage.device)  # None: those of a CPU
        if self._kernels is None and storage.device.type != "cpu":
            reason = "the kernels of layers with a state do not run on this GPU, as the log says"
            raise ConfigError(f"{reason}; set engine.device=cpu")

    def plan(self, rows: IntArray, counts: IntArray, num_padding: int = 0) -> StateRows | DeviceStatePlan:
        planned = plan_states(self._table, rows, counts)
        if num_padding:
            planned = planned.padded(num_padding, self._storage.scratch_block)
        return planned if self._kernels is None else DeviceStatePlan(self._kernels, planned)


def plan_states(table: SequenceTable, rows: IntArray, counts: IntArray) -> StateRows:
    """Plan rows of the table that compute `counts` tokens each: a state is left at the end of each block, and of all.
    Example: blocks of 16; a sequence with 30 tokens computed goes on by 5. It reads the state in its block 1, leaves
    the state of 32 tokens there, and the state of 35 tokens in block 2."""
    if table.state_blocks:
        return _plan_apart(table, rows, counts)
    size, before = table.block_size, table.num_computed[rows]
    sources = np.where(before > 0, table.block_tables[rows, np.maximum(before - 1, 0) // size], NO_BLOCK)
    firsts = np.cumsum(counts) - counts
    first_columns, ends = before // size, before + counts
    num_parts = (ends - 1) // size - first_columns + 1
    sequences = np.repeat(np.arange(len(rows)), num_parts)
    part_rows, columns = tokens_of(rows, first_columns, num_parts)
    num_tokens = np.minimum((columns + 1) * size, ends[sequences])
    token_rows = firsts[sequences] + num_tokens - before[sequences] - 1
    return StateRows(
        firsts, sources, StateParts(token_rows, table.block_tables[part_rows, columns], num_tokens, sequences)
    )


def _plan_apart(table: SequenceTable, rows: IntArray, counts: IntArray) -> StateRows:
    """Plan rows whose states have blocks of their own: a state is left there, and at edges where it is to be kept.
    Example: a sequence with 30 tokens computed goes on by 40, and its states behind 64 are kept. It reads its own
    states, leaves the states of 64 tokens in the blocks that keep them, and the states of 70 tokens in its own."""
    before = table.num_computed[rows]
    firsts, afters = np.cumsum(counts) - counts, before + counts
    blocks = table.state_tables[rows].T.copy()  # [columns, sequences]
    sources = np.where(before > 0, blocks, NO_BLOCK)
    if not table.kept_states:
        numbers = np.arange(len(rows))
        return _in_columns(firsts, sources, blocks, StateParts(firsts + counts - 1, blocks[0], afters, numbers))
    parts: list[tuple[int, int, Sequence[int]]] = []  # sequence, tokens of its context, blocks
    for index, (row, first, last) in enumerate(zip(rows.tolist(), before.tolist(), afters.tolist(), strict=True)):
        edges = sorted(table.kept_states.pop(row, ()))
        parts += [(index, edge.num_tokens, edge.block_ids) for edge in edges if first < edge.num_tokens <= last]
        parts.append((index, last, table.state_tables[row]))
    sequences = np.array([part[0] for part in parts])
    num_tokens = np.array([part[1] for part in parts])
    targets = np.array([part[2] for part in parts]).T.copy()  # [columns, parts]
    token_rows = firsts[sequences] + num_tokens - before[sequences] - 1
    return _in_columns(firsts, sources, targets, StateParts(token_rows, targets[0], num_tokens, sequences))


def _in_columns(firsts: IntArray, sources: IntArray, targets: IntArray, parts: StateParts) -> StateRows:
    further = [StateColumn(*blocks) for blocks in zip(sources[1:], targets[1:], strict=True)]
    return StateRows(firsts, sources[0], parts, further)


logger = logging.getLogger(__name__)


class LateStates:
    """Looks at each sequence that comes with cached tokens before its first slice. It may come with keys and values of
    more tokens than the state beside them knows: half a block of the prefix cache has its state behind its last token.
    Such a sequence computes the tokens between again, in its first slice."""

    def __init__(self, table: SequenceTable, storage: BlockStorage) -> None:
        self._table, self._copies = table, storage.pending_copies
        self._behind = tokens_behind_states(storage)
        # Rings go on from earlier tokens, too, as far as those behind these are in blocks to spare: of a step that was
        # launched ahead and dropped.
        self._num_ahead = table.block_size if storage.layout.ring_layers else 0
        self._new: set[int] = set()  # rows that have not been looked at

    def note(self, row: int) -> None:
        sequence = self._table.sequence(row)
        self._new.discard(row)
        if sequence.num_cached and not sequence.is_trial:
            self._new.add(row)

    def caught_up(self, slices: Slices) -> Slices:
        if not self._new:
            return slices
        longer = []
        for request_id, num_tokens in slices:
            row, num_lost = self._table.row(request_id), 0
            if row in self._new:
                self._new.remove(row)
                num_lost = self._num_lost(row)
            if num_lost:
                logger.info("%s: computes %d tokens again, behind which there is no state", request_id, num_lost)
                self._table.num_computed[row] -= num_lost
            longer.append((request_id, num_tokens + num_lost))
        return longer

    def _num_lost(self, row: int) -> int:
        table = self._table
        self._copies.synchronize(table.blocks_of(np.array([row])))  # the host reads what they bring
        if table.state_blocks:
            behind, num_computed = int(self._behind[table.state_tables[row, 0]]), int(table.num_computed[row])
            is_known = 0 < behind <= num_computed + self._num_ahead
            return max(num_computed - behind, 0) if is_known else num_computed
        num_computed, size = int(table.num_computed[row]), table.block_size
        for column in range((num_computed - 1) // size, -1, -1):
            behind = int(self._behind[table.block_tables[row, column]])
            if column * size < behind <= min((column + 1) * size, num_computed):
                return num_computed - behind
        return num_computed
