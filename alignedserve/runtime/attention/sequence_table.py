"""The table of sequences being computed: one row of persistent arrays each, so that a step is a few operations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.picture import PictureRun, settled_len
from alignedserve.core.request import LoraAdapter, SamplingParams
from alignedserve.runtime.pictures import RopePlaces, SequenceEmbeddings
from kernels.lora import AdapterMatrices

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence to add to the engine: new, or resumed with tokens and blocks from elsewhere."""

    request_id: RequestId
    token_ids: tuple[int, ...]  # prompt, then what has been generated so far
    prompt_len: int
    num_cached: int  # leading tokens whose keys and values already lie in the blocks; below len(token_ids)
    block_ids: tuple[BlockId, ...]  # owned by the caller, for this sequence alone to write; first those of its states
    sampling: SamplingParams
    is_hidden: bool = False  # its blocks hold layer inputs
    is_reversed: bool = False  # token i of a block lies in slot block_size - 1 - i: it is filled from its end
    adapter: AdapterMatrices | None = None  # it is computed with; None: the model alone
    lora: LoraAdapter | None = None  # by which other ranks find their part of the adapter
    places: RopePlaces | None = None  # as rotations count them; None: as tokens follow one another
    pictures: SequenceEmbeddings | None = None  # in place of tokens; None: of no token that is to be computed
    whole_runs: tuple[PictureRun, ...] = ()  # of tokens that read one another both ways, see whole_slices
    is_trial: bool = False  # its cached tokens are not computed, and its answer is of no use: to time steps
    tenant: str = ""
    is_real_time: bool = True


class StateEdge(NamedTuple):
    """The blocks in which a sequence leaves its states behind so many tokens."""

    num_tokens: int
    block_ids: tuple[BlockId, ...]


class _KnownIds(NamedTuple):
    version: int  # of the table
    rows: IntArray
    ids: list[RequestId]


class SequenceTable:
    """Rows of arrays by sequence. Only the engine writes; `version` changes whenever a row changes owner."""

    def __init__(
        self,
        *,
        max_sequences: int,
        max_context_len: int,
        block_size: int,
        hidden_block_tokens: int | None = None,
        state_blocks: int = 0,
    ) -> None:
        """`hidden_block_tokens`: tokens whose layer inputs a block holds; None: there are no hidden caches.
        `state_blocks`: of a sequence's states, which are the first of its blocks."""
        self.block_size = block_size
        self.state_blocks = state_blocks
        self.hidden_block_tokens = hidden_block_tokens
        self.max_context_len = max_context_len
        self.version = 0
        self.num_reversed = 0  # sequences that fill their blocks from the end
        self.sequences: list[NewSequence | None] = [None] * max_sequences
        max_blocks = blocks_for(max_context_len, block_size)
        self.request_ids = [RequestId("")] * max_sequences  # of free rows: meaningless
        self.block_tables = np.zeros((max_sequences, max_blocks), np.int64)
        self.state_tables = np.zeros((max_sequences, state_blocks), np.int64)
        self.kept_states: dict[int, list[StateEdge]] = {}  # by row, of the next step
        # One more than the context: the token sampled at its end is known, but never computed.
        self.tokens = np.zeros((max_sequences, max_context_len + 1), np.int32)
        self.prompt_lens = np.zeros(max_sequences, np.int64)
        self.end_lens = np.zeros(max_sequences, np.int64)  # with so many tokens known, none is computed any more
        self.entries = np.zeros(max_sequences, np.int64)  # how often the row was given to a sequence
        self.num_blocks = np.zeros(max_sequences, np.int64)
        self.num_tokens = np.zeros(max_sequences, np.int64)
        self.num_computed = np.zeros(max_sequences, np.int64)
        self.is_hidden = np.zeros(max_sequences, np.bool_)
        self.is_reversed = np.zeros(max_sequences, np.bool_)
        self.block_tokens = np.full(max_sequences, block_size)  # that a block of the sequence holds
        self.has_unclean_tail = np.zeros(max_sequences, np.bool_)
        self.wants_prompt_logprobs = np.zeros(max_sequences, np.bool_)
        self.wants_embedding = np.zeros(max_sequences, np.bool_)
        self.has_adapter = np.zeros(max_sequences, np.bool_)
        self.has_places = np.zeros(max_sequences, np.bool_)
        self.pictures_end = np.zeros(max_sequences, np.int64)  # behind the last position that is a picture's
        self.whole_runs: dict[int, tuple[PictureRun, ...]] = {}  # by row, of sequences that have some
        self.num_owed = np.zeros(max_sequences, np.int64)  # tokens that slices had, and that are not computed yet
        self._row_of: dict[RequestId, int] = {}
        self._known_ids = _KnownIds(-1, np.empty(0, np.int64), [])
        self._free_rows = list(range(max_sequences - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._row_of

    def row(self, request_id: RequestId) -> int:
        assert request_id in self._row_of, f"unknown request {request_id}"
        return self._row_of[request_id]

    def rows(self, request_ids: Sequence[RequestId]) -> IntArray:
        try:
            return np.array([self._row_of[request_id] for request_id in request_ids], np.int64)
        except KeyError as error:
            raise AssertionError(f"unknown request {error}") from error

    def ids_of(self, rows: IntArray) -> list[RequestId]:
        """Return the requests of these rows: the same list as long as they are the same, which nobody is to change."""
        known = self._known_ids
        if known.version != self.version or not are_same(rows, known.rows):
            ids = [self.request_ids[row] for row in rows.tolist()]
            self._known_ids = known = _KnownIds(self.version, rows, ids)
        return known.ids

    def add(self, sequence: NewSequence) -> int:
        request_id, count = sequence.request_id, len(sequence.token_ids)
        assert request_id not in self._row_of, f"request {request_id} added twice"
        assert self._free_rows, "more sequences than max_sequences"
        assert 1 <= sequence.prompt_len <= count <= self.max_context_len, f"{request_id}: bad number of tokens"
        assert 0 <= sequence.num_cached < count, f"{request_id}: num_cached must leave a token to compute"
        row = self._free_rows.pop()
        self._row_of[request_id] = row
        self.sequences[row] = sequence
        self.request_ids[row] = request_id
        self.tokens[row, :count] = sequence.token_ids
        self.num_tokens[row] = count
        self.num_computed[row] = settled_len(sequence.whole_runs, sequence.num_cached)
        self.num_owed[row] = sequence.num_cached - self.num_computed[row]
        if sequence.whole_runs:
            self.whole_runs[row] = sequence.whole_runs
        self.num_blocks[row] = 0
        self.prompt_lens[row] = sequence.prompt_len
        # The token sampled at the end of the longest context is known as well.
        self.end_lens[row] = min(sequence.prompt_len + sequence.sampling.max_tokens, self.max_context_len + 1)
        self.entries[row] += 1
        self.is_hidden[row] = sequence.is_hidden
        assert not (sequence.is_hidden and sequence.is_reversed), f"{request_id}: a hidden cache in reversed blocks"
        self.is_reversed[row] = sequence.is_reversed
        self.num_reversed += sequence.is_reversed
        self.block_tokens[row] = self._block_tokens_of(sequence)
        # Behind a reversed sequence's tokens lie slots that may be those of another one.
        self.has_unclean_tail[row] = self.num_computed[row] > 0 and not (sequence.is_hidden or sequence.is_reversed)
        self.wants_prompt_logprobs[row] = sequence.sampling.num_prompt_logprobs is not None
        self.wants_embedding[row] = sequence.sampling.wants_embedding
        assert sequence.adapter is None or not sequence.is_hidden, f"{request_id}: a hidden cache with an adapter"
        self.has_adapter[row] = sequence.adapter is not None
        self.has_places[row] = sequence.places is not None
        self.pictures_end[row] = 0 if sequence.pictures is None else sequence.pictures.positions[-1] + 1
        self.version += 1
        of_states, of_tokens = sequence.block_ids[: self.state_blocks], sequence.block_ids[self.state_blocks :]
        self.state_tables[row] = of_states
        self.append_blocks(request_id, of_tokens)
        capacity = len(of_tokens) * int(self.block_tokens[row])
        assert sequence.num_cached <= capacity, f"{request_id}: cached without blocks"
        return row

    def _block_tokens_of(self, sequence: NewSequence) -> int:
        if not sequence.is_hidden:
            return self.block_size
        assert self.hidden_block_tokens is not None, "a hidden cache where there is none"
        return self.hidden_block_tokens

    def append_blocks(self, request_id: RequestId, block_ids: Sequence[BlockId]) -> None:
        row = self.row(request_id)
        first = int(self.num_blocks[row])
        last = first + len(block_ids)
        assert last <= self.block_tables.shape[1], f"{request_id}: more blocks than max_context_len needs"
        self.block_tables[row, first:last] = block_ids
        self.num_blocks[row] = last

    def keep_states(self, request_id: RequestId, num_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Leave the states behind so many tokens in these blocks as well, if the next step passes there."""
        assert len(block_ids) == self.state_blocks, f"{request_id}: not the blocks of its states"
        self.kept_states.setdefault(self.row(request_id), []).append(StateEdge(num_tokens, tuple(block_ids)))

    def note_tokens(self, rows: IntArray, places: IntArray, token_ids: IntArray, is_usable: BoolArray) -> bool:
        """Write tokens of these rows, which count as known already; return whether all of them are usable."""
        if is_usable.all():
            self.tokens[rows, places] = token_ids
            return True
        self.tokens[rows[is_usable], places[is_usable]] = token_ids[is_usable]
        self.num_tokens[rows[~is_usable]] -= 1
        return False

    def lend_blocks(self, rows: IntArray, columns: IntArray, blocks: IntArray) -> None:
        assert (columns >= self.num_blocks[rows]).all(), "a loan in the place of a block"
        self.block_tables[rows, columns] = blocks

    def replace_block(self, request_id: RequestId, index: int, block_id: BlockId) -> None:
        """Put another block, which holds the same, into the sequence's block table; its own must be full."""
        row = self.row(request_id)
        assert (index + 1) * self.block_size <= self.num_computed[row], f"{request_id}: replaces a block that it fills"
        self.block_tables[row, index] = block_id
        self.version += 1

    def places(self, rows: IntArray, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return the block of each token, given by the row of its sequence and its position, and its slot there."""
        columns, slots = np.divmod(positions, self.block_size)
        if self.num_reversed:
            slots = np.where(self.is_reversed[rows], self.block_size - 1 - slots, slots)
        return self.block_tables[rows, columns], slots

    def blocks_of(self, rows: IntArray) -> IntArray:
        counts = zip(rows.tolist(), self.num_blocks[rows].tolist(), strict=True)
        of_tokens = [self.block_tables[row, :count] for row, count in counts]
        return np.concatenate([self.state_tables[rows].reshape(-1), *of_tokens])

    def remove(self, request_id: RequestId) -> int:
        row = self.row(request_id)
        del self._row_of[request_id]
        self.num_reversed -= self.sequence(row).is_reversed
        self.sequences[row] = None
        self.whole_runs.pop(row, None)
        self.kept_states.pop(row, None)
        self._free_rows.append(row)
        self.version += 1
        return row

    def space(self, row: int) -> int:
        """Return how many tokens a decoding sequence may compute beside the last one, in the blocks at hand."""
        count = int(self.num_tokens[row])
        if count - self.num_computed[row] != 1 or self.is_hidden[row]:
            return 0
        slots = int(self.num_blocks[row]) * self.block_size
        return min(slots, self.max_context_len, int(self.end_lens[row]) - 1) - count

    @property
    def has_runs_left(self) -> bool:
        return any(self.num_computed[row] < runs[-1][0] + 1 for row, runs in self.whole_runs.items())

    def whole_slices(self, slices: Sequence[tuple[RequestId, int]]) -> Sequence[tuple[RequestId, int]]:
        """Return the slices to compute so that none ends inside a run of tokens that read one another both ways.

        Schedulers cut prompts anywhere. A slice that would end inside a run ends before it; the slice that reaches the
        run's end computes the rest.

        Example: a run of positions 4 to 9, in slices of 6, 3 and 3 tokens: they compute 4, 0 and 8."""
        if not self.whole_runs:
            return slices
        whole = []
        for request_id, count in slices:
            row = self.row(request_id)
            end = int(self.num_computed[row] + self.num_owed[row]) + count
            until = settled_len(self.whole_runs.get(row, ()), end)
            self.num_owed[row] = end - until
            if until > self.num_computed[row]:
                whole.append((request_id, until - int(self.num_computed[row])))
        return whole

    def sequence(self, row: int) -> NewSequence:
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is free"
        return sequence


def are_same(rows: IntArray, others: IntArray) -> bool:
    """Return whether these are the same rows in the same order: `np.array_equal` in a fifth of its time."""
    return rows is others or rows.tobytes() == others.tobytes()


def tokens_of(rows: IntArray, first: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return rows and positions, one after another, of `counts` tokens of each row, from position `first` on."""
    ends = np.cumsum(counts)
    offsets = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(rows, counts), np.repeat(first, counts) + offsets


Runs = Sequence[PictureRun]


def ends_of(runs: Mapping[int, Runs], rows: IntArray, before: IntArray, counts: IntArray) -> IntArray | None:
    """Return where what each token of these chunks reads ends [tokens]; None: none of them reads a later one.

    `runs`: of rows that have some; `before`: computed tokens in front of each chunk."""
    if not any(row in runs for row in rows.tolist()):
        return None
    ends = []
    for row, first, count in zip(rows.tolist(), before.tolist(), counts.tolist(), strict=True):
        row_ends = np.arange(first, first + count) + 1
        for start, length in runs.get(row, ()):
            row_ends[max(start - first, 0) : max(start + length - first, 0)] = start + length
        assert row_ends[-1] == first + count, "a chunk that ends inside a run"
        ends.append(row_ends)
    return np.concatenate(ends)
