"""The step after the present one: planned on the host meanwhile, and launched ahead on a device.

A step that is launched ahead decodes one more token of every sequence, and reads the tokens that are being chosen where
they lie, on the device; beside them it computes more of the prompts that are not at their ends, as far as `ChunkGuess`
expects. What happens to a sequence once its token is known (it stops, is cancelled, preempted or waits) is noticed when
the next step is asked for: results of sequences that still are as they were are that step's, all others are dropped; of
a chunk as many tokens as are asked for. They have left nothing but keys and values behind the computed tokens, in slots
that are written again before they are read. Blocks that such a step writes wait like those of a copy: another sequence
may have them by then. A sequence that has no blocks yet for its tokens is lent some (`BlockLoans`)."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId
from alignedserve.runtime.attention.ring_tables import KeptRings, RingTables
from alignedserve.runtime.attention.sequence_table import BoolArray, IntArray, SequenceTable, are_same, tokens_of
from alignedserve.runtime.device.accelerator import in_inference_mode
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import Stream
from alignedserve.runtime.engine.sampling.sampler import Sampler
from alignedserve.runtime.engine.steps.batch_builder import BatchBuilder
from alignedserve.runtime.engine.steps.step import LentBlocks, Slices, StepBatch, StepLaunch
from alignedserve.runtime.kv.block_storage import BlockStorage

MOST_TOKENS = 2048  # longer chunks hide the host's work anyway, and whoever comes in between waits for them
_SPARE_TOKENS = 16  # of sequences that may end with the present step
_NO_ROWS = np.empty(0, np.int64)


class GuessedChunks(NamedTuple):
    """GuessedChunks of prompts, each of two tokens or more."""

    rows: IntArray  # of the sequence table
    counts: IntArray


NO_CHUNKS = GuessedChunks(_NO_ROWS, _NO_ROWS)


class ChunkGuess:
    """Guesses which chunks of prompts the next step will be asked for; it sees every step that is asked for. A
    scheduler fills its budget of tokens with decodes, then with what is left of a prompt. So a prompt that is not at
    its end goes on with what its step leaves of the same number of tokens; a few more are guessed, as a sequence that
    ends gives its token to the chunk. A guess that is too long costs the computation of a few tokens, a short one a
    pass for the rest, and a wrong one a whole step: after a guess that was not confirmed nothing is launched until the
    next would have been."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._asked = NO_CHUNKS  # all slices of the present step
        self._guess = NO_CHUNKS
        self.is_trusted = True  # the latest guess was confirmed

    def note(self, rows: IntArray, counts: IntArray) -> None:
        """Take note of a step that is asked for: slices by rows of the table, before it is computed."""
        self._asked = GuessedChunks(rows, counts)
        if len(self._guess.rows):
            asked_for = dict(zip(rows.tolist(), counts.tolist(), strict=True))
            pairs = zip(self._guess.rows.tolist(), self._guess.counts.tolist(), strict=True)
            self.is_trusted = all(_is_near(asked_for.get(row, 0), count) for row, count in pairs)
            self._guess = NO_CHUNKS

    def chunks(self, sampled_rows: IntArray, num_decodes: int) -> GuessedChunks | None:
        """Return the chunks to launch beside so many decodes, once the present step is launched, which samples these
        rows; None: prompts go on, nobody knows how. The table is as after that step."""
        if len(sampled_rows) == len(self._asked.rows):
            return NO_CHUNKS
        rows = self._asked.rows[~np.isin(self._asked.rows, sampled_rows)]
        self._guess = self._guessed(rows, num_decodes)
        return self._guess if len(self._guess.rows) and self.is_trusted else None

    def _guessed(self, rows: IntArray, num_decodes: int) -> GuessedChunks:
        table = self._table
        if (table.wants_embedding[rows] | table.wants_prompt_logprobs[rows]).any():  # the host looks at such a chunk
            return NO_CHUNKS
        left = int(self._asked.counts.sum()) - num_decodes
        chosen: list[tuple[int, int]] = []
        for row in rows.tolist():
            count = min(int(table.num_tokens[row] - table.num_computed[row]), left + _SPARE_TOKENS)
            if min(count, left) < 2:
                break
            chosen.append((row, count))
            left -= count
        if not chosen or sum(count for _, count in chosen) > MOST_TOKENS:
            return NO_CHUNKS
        return GuessedChunks(*(np.array(column, np.int64) for column in zip(*chosen, strict=True)))


def _is_near(actual: int, guessed: int) -> bool:
    return max(guessed - guessed // 4 - _SPARE_TOKENS, 1) <= actual <= guessed


_LARGEST_SHARE = 32  # of the blocks, one in so many at most is the engine's own


_NO_LOANS = LentBlocks(*(np.empty(0, np.int64),) * 3)


class BlockLoans:
    """Lends the engine's own blocks to sequences of one step at a time that lack blocks for their next tokens. A step
    that is launched ahead writes keys and values before the sequence's owner has given blocks for them. When the step
    is asked for, the owner has, and what was written is copied there: one slot of a sequence that decodes, blocks of a
    chunk. When it is dropped, nothing is left to do. The compute stream alone uses both blocks, in its order, and so
    the same few are lent again to the next step. Owners never count them."""

    def __init__(self, table: SequenceTable, storage: BlockStorage, compute: Stream, blocks: Sequence[BlockId]) -> None:
        self._table = table
        self._storage = storage
        self._compute = compute
        self._blocks = np.array(blocks, np.int64)

    def lend(self, rows: IntArray, chunks: GuessedChunks) -> LentBlocks | None:
        """Give blocks to those of these rows that lack one for their next token, and to chunks; None: too few."""
        table = self._table
        lacks = table.num_computed[rows] >= table.num_blocks[rows] * table.block_size
        if not len(chunks.rows) and not lacks.any():  # as in most steps
            return _NO_LOANS
        lacking = rows[lacks]
        columns = table.num_computed[lacking] // table.block_size
        if len(chunks.rows):
            ends = -(-(table.num_computed[chunks.rows] + chunks.counts) // table.block_size)
            held = table.num_blocks[chunks.rows]
            more_rows, more_columns = tokens_of(chunks.rows, held, np.maximum(ends - held, 0))
            lacking, columns = np.concatenate((lacking, more_rows)), np.concatenate((columns, more_columns))
        loans = LentBlocks(lacking, columns, self._blocks[: len(lacking)])
        if len(loans.blocks) < len(loans.rows):
            return None
        table.lend_blocks(*loans)
        return loans

    def settle(self, loans: LentBlocks, rows: IntArray) -> None:
        """Bring what a step wrote for these rows into the blocks that they have been given since. The table has what
        they have computed with it."""
        table = self._table
        if not len(loans.rows):
            return
        num_slots = table.num_computed[loans.rows] - loans.columns * table.block_size  # in each block, and behind it
        is_taken = np.zeros(len(table.sequences), np.bool_)
        is_taken[rows] = True
        is_written = is_taken[loans.rows] & (num_slots > 0)
        if not is_written.any():
            return
        lent_rows, columns, sources = (part[is_written] for part in loans)
        assert (columns < table.num_blocks[lent_rows]).all(), "too few blocks for the slice"
        targets, copies = table.block_tables[lent_rows, columns], self._storage.pending_copies
        copies.wait(self._compute, targets)
        self._compute.run(partial(self._copy, sources, targets, num_slots[is_written] == 1))
        copies.record(self._compute, targets)

    @in_inference_mode
    def _copy(self, sources: IntArray, targets: IntArray, has_one_slot: BoolArray) -> None:
        for is_of_these, copy in (
            (has_one_slot, self._storage.copy_first_slots),
            (~has_one_slot, self._storage.copy_whole),
        ):
            if is_of_these.any():
                copy(*to_device([sources[is_of_these], targets[is_of_these]], self._storage.device))


def num_lent_blocks(num_blocks: int, max_sequences: int, block_size: int) -> int:
    return min(max_sequences + blocks_for(MOST_TOKENS, block_size) + 1, num_blocks // _LARGEST_SHARE)


class RingKeeper:
    """Leaves copies of rings behind edges that a step passed before they were asked for: it was launched ahead. What
    the step wrote since the edge is in blocks to spare: the rings can still be copied, on the compute stream."""

    def __init__(self, rings: RingTables, storage: BlockStorage, compute: Stream) -> None:
        self._rings, self._storage, self._compute = rings, storage, compute

    def leave(self, rows: IntArray) -> None:
        rings = self._rings.kept_by(rows, is_computed=True)
        blocks, pending = rings.written_blocks, self._storage.pending_copies
        if not len(blocks):
            return
        pending.wait(self._compute, blocks)
        self._compute.run(partial(self._copy, rings))
        pending.record(self._compute, blocks)

    @in_inference_mode
    def _copy(self, rings: KeptRings) -> None:
        rings.leave(self._storage)
        rings.mark_missed(self._storage)


_NOWHERE = -1


class NextStep:
    """The next step so far, until somebody takes it."""

    def __init__(
        self,
        table: SequenceTable,
        builder: BatchBuilder,
        sampler: Sampler,
        loans: BlockLoans,
        *,
        plans: bool,
        launches: bool,
        launches_chunks: bool = True,
        kept_rings: RingKeeper | None = None,
    ) -> None:
        """`plans`: steps are planned ahead; `launches`: and launched, `launches_chunks`: where prompts go on in them.
        `kept_rings`: None: sequences have no rings."""
        self.launches, self._launches_chunks = launches, launches_chunks
        self.guess = ChunkGuess(table)
        self._loans = loans
        self._kept_rings = kept_rings
        self._table = table
        self._builder = builder
        self._sampler = sampler
        self._plans = plans
        self._planned: StepBatch | None = None
        self._version = 0  # of the table when it was planned
        self._launched: StepLaunch | None = None
        self._launched_version = -1  # of the table
        # A step that is dropped may still be computed, with adapters that nothing else holds. When the second one after
        # it is launched, tokens that come behind it have been waited for.
        self._held: deque[StepLaunch] = deque(maxlen=2)
        self._entries = self._num_tokens = np.empty(0, np.int64)  # of the launched step's rows, see SequenceTable
        self._asked: Slices = ()
        self._asked_version = -1  # of the table
        self._arrays = self._entries, self._entries
        self._place_of = np.full(len(table.sequences), _NOWHERE, np.int64)  # by row; for one call at a time
        self._ascending = np.arange(2 * len(table.sequences))  # a step may be divided into two launches

    def forget(self) -> None:
        self._planned = None

    def drop(self) -> None:
        self._launched = None

    def plan(self, launches: Sequence[StepLaunch]) -> None:
        self._planned = None
        launch = launches[-1]
        is_within = (self._table.num_computed[launch.rows] < self._table.max_context_len).all()
        if self._plans and len(launches) == 1 and is_within and _all_decode(launch):
            self._planned = self._builder.build_decodes(launch.rows)
            self._version = self._table.version

    def take_planned(self, slices: Slices) -> StepBatch | None:
        """Return the planned step if it consists of these slices, with tokens and new blocks filled in; else None."""
        step, table = self._planned, self._table
        if step is None or self._version != table.version or len(slices) != len(step.rows):
            return None
        if any(part[1] != 1 for part in slices):
            return None
        rows = table.rows([part[0] for part in slices])
        if not are_same(np.sort(rows), np.sort(step.rows)):
            return None
        return self._builder.complete(step)

    def after(self, launches: Sequence[StepLaunch]) -> StepLaunch | None:
        """Return the step to launch behind the step of these launches, with its tokens as inputs; None: none can be.
        Sequences that end with this step are left out. The host must need no last token, and blocks must be free to
        lend. Where prompts go on and nobody knows how far, no step is launched: decodes apart from chunks would read
        the weights twice."""
        table = self._table
        if not self.launches or any(launch.step.hidden is not None for launch in launches):
            return None
        if table.num_reversed:  # a slot behind a sequence may be another's
            return None
        sampled_rows = launches[0].rows if len(launches) == 1 else np.concatenate([launch.rows for launch in launches])
        has_more = self._table.num_tokens[sampled_rows] < self._table.end_lens[sampled_rows]
        rows = sampled_rows if has_more.all() else sampled_rows[has_more]
        chunks = self.guess.chunks(sampled_rows, len(rows))
        if chunks is None or not len(rows) + len(chunks.rows) or not self._can_choose(rows, chunks):
            return None
        if len(chunks.rows) and not self._launches_chunks:
            return None
        loans = self._loans.lend(rows, chunks)
        if loans is None:
            return None
        step = self._builder.build_ahead(rows, *chunks)
        decoding = step.rows[: len(rows)]
        assert are_same(decoding, step.sampled_rows[: len(rows)]), "inputs in another order than results"
        inputs_at = self._places_in(launches, decoding) if len(rows) else None
        return StepLaunch(step, table.num_tokens[step.sampled_rows], inputs_at=inputs_at, loans=loans)

    def _places_in(self, launches: Sequence[StepLaunch], rows: IntArray) -> IntArray:
        first = launches[0]
        if len(launches) == 1 and are_same(rows, first.step.sampled_rows):  # as in most steps
            return self._ascending[first.first_place : first.end_place]
        for launch in launches:
            self._place_of[launch.step.sampled_rows] = self._ascending[launch.first_place : launch.end_place]
        return self._place_of[rows]

    def keep(self, launched: StepLaunch) -> None:
        self._launched = launched
        self._held.append(launched)
        rows = launched.step.rows
        self._entries, self._num_tokens = self._table.entries[rows], self._table.num_tokens[rows]
        self._launched_version = self._table.version

    def take_launched(self, slices: Slices) -> tuple[StepLaunch | None, Slices]:
        """Return the step that was launched ahead, and the slices that are left. The launched step keeps the results
        that the slices ask for, and the table counts their tokens as computed."""
        launched, self._launched = self._launched, None
        if not self.launches:
            return None, slices
        rows, counts = self._asked_rows(slices)
        self.guess.note(rows, counts)
        if launched is None:
            return None, slices
        taken = counts
        if not self._is_as_asked(launched.step, rows, counts):
            taken, sampled = self._taken(launched, rows, counts)
            if not taken.any():
                return None, slices
            is_whole = are_same(sampled, self._ascending[: len(launched.step.sampled_rows)])
            launched.kept = None if is_whole else sampled[sampled != _NOWHERE]
        self._table.num_computed[rows] += taken
        self._table.num_tokens[launched.rows] = launched.num_tokens_before + 1
        if launched.loans is not None and len(launched.loans.rows):
            self._loans.settle(launched.loans, rows[taken > 0])
        if self._kept_rings is not None and self._table.kept_states:
            self._kept_rings.leave(rows[taken > 0])
        if taken is counts:
            return launched, ()
        lacking = np.flatnonzero(taken < counts)
        return launched, [(slices[at][0], int(counts[at] - taken[at])) for at in lacking.tolist()]

    def _asked_rows(self, slices: Slices) -> tuple[IntArray, IntArray]:
        table = self._table
        is_known = isinstance(slices, tuple) and slices is self._asked and table.version == self._asked_version
        if not is_known:
            self._asked, self._asked_version = slices, table.version
            rows = table.rows([part[0] for part in slices])
            self._arrays = rows, np.array([part[1] for part in slices], np.int64)
        return self._arrays

    def _is_as_asked(self, step: StepBatch, rows: IntArray, counts: IntArray) -> bool:
        table = self._table
        if table.version != self._launched_version or not are_same(rows, step.rows):
            return False
        return are_same(counts, step.counts) and are_same(self._num_tokens, table.num_tokens[rows])

    def _taken(self, launched: StepLaunch, rows: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Return how many tokens of each slice the step has computed, and the place of its own among those sampled.
        None of a sequence that is another than was launched, or has other tokens; no place if it goes on without."""
        step, table = launched.step, self._table
        places = self._places_of(rows, step.rows)
        has_same = self._entries[places] == table.entries[rows]
        has_same &= (self._num_tokens[places] == table.num_tokens[rows]) & (places != _NOWHERE)
        taken = np.where(has_same, np.minimum(step.counts[places], counts), 0)
        is_sampled = (taken > 0) & (table.num_computed[rows] + taken == table.num_tokens[rows])
        return taken, np.where(is_sampled, self._places_of(rows, step.sampled_rows), _NOWHERE)

    def _places_of(self, rows: IntArray, others: IntArray) -> IntArray:
        ascending, place_of = self._ascending[: len(others)], self._place_of
        if are_same(rows, others):  # as in most steps
            return ascending
        place_of[:] = _NOWHERE
        place_of[others] = ascending
        return place_of[rows]

    def _can_choose(self, rows: IntArray, chunks: GuessedChunks) -> bool:
        table, own = self._table, chunks.rows
        ending = own[table.num_computed[own] + chunks.counts == table.num_tokens[own]] if len(own) else own
        begins = not len(ending) or self._sampler.can_begin_ahead(ending)
        return begins and self._sampler.can_start_ahead(rows)


def _all_decode(launch: StepLaunch) -> bool:
    step = launch.step
    return len(step.sampled_rows) == len(step.rows) and step.hidden is None
