"""The step after the present one: planned on the host meanwhile, and launched ahead on a device.

A step that is launched ahead decodes one more token of every sequence, and reads the tokens that are being chosen where
they lie, on the device; beside them it computes more of the prompts that are not at their ends, as far as `ChunkGuess`
expects. What happens to a sequence once its token is known (it stops, is cancelled, preempted or waits) is noticed when
the next step is asked for: results of sequences that still are as they were are that step's, all others are dropped; of
a chunk as many tokens as are asked for. They have left nothing but keys and values behind the computed tokens, in slots
that are written again before they are read. Blocks that such a step writes wait like those of a copy: another sequence
may have them by then. A sequence that has no blocks yet for its tokens is lent some (`BlockLoans`).
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from alignedserve.runtime.attention.sequence_table import IntArray, SequenceTable, are_same
from alignedserve.runtime.engine.sampling.sampler import Sampler
from alignedserve.runtime.engine.steps.block_loans import BlockLoans
from alignedserve.runtime.engine.steps.chunk_guess import ChunkGuess, GuessedChunks
from alignedserve.runtime.engine.steps.kept_rings import RingKeeper
from alignedserve.runtime.engine.steps.planned_step import StepBatch
from alignedserve.runtime.engine.steps.step_batch import BatchBuilder
from alignedserve.runtime.engine.steps.step_launch import StepLaunch
from alignedserve.runtime.engine.steps.step_output import Slices

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
        """Plan one more token of every sequence of the step that was launched last, unless it was divided."""
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
        """Return the step to launch behind this one, whose tokens are its inputs; None: there is none that can be.

        `launches`: all of the step's. Sequences that have all their tokens with this one are left out. Of all others
        nothing must have to be known about the last one on the host, and there must be blocks to lend to those without
        room for their tokens. Where prompts go on, and it is not known how far, there is none: decodes apart from
        chunks would read the weights twice.
        """
        table = self._table
        if not self.launches or any(launch.step.hidden is not None for launch in launches):
            return None
        if table.num_reversed:  # a slot behind a sequence may be another's
            return None
        sampled_rows = launches[0].rows if len(launches) == 1 else np.concatenate([launch.rows for launch in launches])
        rows = self._going_on(sampled_rows)
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
        """Return the step that was launched ahead, and the slices that are left.

        It keeps what the slices ask for, and the table is as after a launch of that; without any there is no such step.
        """
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

        None of a sequence that is another than was launched, or has other tokens; no place if it goes on without.
        """
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

    def _going_on(self, rows: IntArray) -> IntArray:
        has_more = self._table.num_tokens[rows] < self._table.end_lens[rows]
        return rows if has_more.all() else rows[has_more]


def _all_decode(launch: StepLaunch) -> bool:
    step = launch.step
    return len(step.sampled_rows) == len(step.rows) and step.hidden is None
