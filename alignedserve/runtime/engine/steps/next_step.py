"""The step after the present one: planned on the host meanwhile, and launched ahead on a device.

A step that is launched ahead decodes one more token of every sequence, and reads the tokens that are being chosen where
they lie, on the device. What happens to a sequence once its token is known (it stops, is cancelled, preempted or waits)
is noticed when the next step is asked for: results of sequences that still are as they were are that step's, all others
are dropped. They have left nothing but keys and values behind the computed tokens, in slots that are written again
before they are read. Blocks that such a step writes wait like those of a copy: another sequence may have them by then.
A sequence that has no block yet for the token is lent one (`BlockLoans`).
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence, SequenceTable
from alignedserve.runtime.engine.sampling.sampler import Sampler
from alignedserve.runtime.engine.steps.block_loans import BlockLoans
from alignedserve.runtime.engine.steps.step_batch import BatchBuilder, StepBatch
from alignedserve.runtime.engine.steps.step_launch import StepLaunch
from alignedserve.runtime.engine.steps.step_output import Slices


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
    ) -> None:
        """`plans`: steps are planned ahead; `launches`: and launched."""
        self.launches = launches
        self._loans = loans
        self._table = table
        self._builder = builder
        self._sampler = sampler
        self._plans = plans
        self._planned: StepBatch | None = None
        self._version = 0  # of the table when it was planned
        self._launched: StepLaunch | None = None
        # A step that is dropped may still be computed, with adapters that nothing else holds. When the second one after
        # it is launched, tokens that come behind it have been waited for.
        self._held: deque[StepLaunch] = deque(maxlen=2)
        self._sequences: list[NewSequence | None] = []  # of the launched step's sampled rows

    def forget(self) -> None:
        """Forget what was planned."""
        self._planned = None

    def drop(self) -> None:
        """Drop the results of a step that was launched ahead."""
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
        if not np.array_equal(np.sort(rows), np.sort(step.rows)):
            return None
        self._builder.complete(step)
        return step

    def after(self, launches: Sequence[StepLaunch]) -> StepLaunch | None:
        """Return the step to launch behind this one, whose tokens are its inputs; None: there is none that can be.

        `launches`: all of the step's. Sequences that have all their tokens with this one are left out. Of all others
        nothing must have to be known about the last one on the host, and there must be blocks to lend to those without
        room for one more token.
        """
        table = self._table
        if not self.launches or not all(map(_all_decode, launches)):
            return None
        rows = self._going_on(np.concatenate([launch.rows for launch in launches]))
        if not len(rows) or not self._sampler.can_start_ahead(rows):
            return None
        if table.is_reversed.any():  # a slot behind a sequence may be another's
            return None
        loans = self._loans.lend(rows)
        if loans is None:
            return None
        step = self._builder.build_decodes(rows)
        assert np.array_equal(step.rows, step.sampled_rows), "the inputs of a step in another order than its results"
        place_of = {row: place for launch in launches for place, row in _places(launch)}
        inputs_at = np.array([place_of[row] for row in step.rows.tolist()], np.int64)
        return StepLaunch(step, table.num_tokens[step.sampled_rows], inputs_at=inputs_at, loans=loans)

    def keep(self, launched: StepLaunch) -> None:
        """Keep a step that was launched ahead until somebody takes it."""
        self._launched = launched
        self._held.append(launched)
        self._sequences = [self._table.sequences[row] for row in launched.step.sampled_rows.tolist()]

    def take_launched(self, slices: Slices) -> tuple[StepLaunch | None, Slices]:
        """Return the step that was launched ahead, and the slices that are left.

        It keeps what the slices ask for, and the table is as after a launch of that; without any there is no such step.
        """
        launched, self._launched = self._launched, None
        if launched is None:
            return None, slices
        place_of = {row: place for place, row in enumerate(launched.step.sampled_rows.tolist())}
        kept, rest = [], []
        for request_id, count in slices:
            place = place_of.get(self._table.row(request_id))
            if place is not None and count == 1 and self._is_as_it_was(launched, place):
                kept.append(place)
            else:
                rest.append((request_id, count))
        if not kept:
            return None, slices
        launched.kept = np.array(kept, np.int64)
        if launched.loans is not None:
            self._loans.settle(launched.loans, launched.rows)
        self._table.num_computed[launched.rows] += 1
        self._table.num_tokens[launched.rows] = launched.num_tokens_before + 1
        return launched, rest

    def _is_as_it_was(self, launched: StepLaunch, place: int) -> bool:
        """Return whether a sequence is the one that was launched, with the token that was its input and no other."""
        row, table = int(launched.step.sampled_rows[place]), self._table
        is_same = table.sequences[row] is self._sequences[place]
        return is_same and table.num_tokens[row] == launched.num_tokens[place] == table.num_computed[row] + 1

    def _going_on(self, rows: IntArray) -> IntArray:
        """Return the rows that have not all their tokens."""
        table = self._table
        limits = np.array([table.sequence(row).sampling.max_tokens for row in rows.tolist()], np.int64)
        has_more = table.num_tokens[rows] - table.prompt_lens[rows] < limits
        return rows[has_more & (table.num_computed[rows] < table.max_context_len)]


def _all_decode(launch: StepLaunch) -> bool:
    """Return whether every sequence of the launch can decode next."""
    step = launch.step
    return len(step.sampled_rows) == len(step.rows) and step.hidden is None


def _places(launch: StepLaunch) -> Iterable[tuple[int, int]]:
    """Return the place of each sampled row's token, and the row."""
    return enumerate(launch.step.sampled_rows.tolist(), launch.first_place)
