"""Admission within objectives: how many candidates may enter before what runs breaks the mean gaps it has to hold.

A decode worker with free blocks would take every candidate, and its iterations would last as long as its memory allows,
whatever the objectives. So a candidate enters only if the iteration with it, by the cost model, is within a share of
the tightest mean gap that a running request can still hold. Those that wait keep their cache in the pool or a buffer.

For a real-time candidate the iteration is of real-time requests alone: best-effort ones that run pause for these, so
that no chat waits until documents end, however many entered while no chat was there.

Example: decodes with gaps of 40 ms run, an iteration takes 34 ms, and each candidate adds 1.5 ms. With a share of 0.9
one enters (35.5 ms), and the next waits until a request has ended. If half of what runs are documents, chats enter up
to 36 ms of chats alone.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from alignedserve.core.class_floor import OVERDUE_S, TurnClass
from alignedserve.core.ids import RequestId
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.table import RequestTable
from alignedserve.scheduling.table_operations import note_decodes
from decode_worker.state import Candidate

_STARVATION_S = 60.0  # a candidate that has waited so long here enters as if nothing had an objective


class AdmissionRoom:
    """Room for candidates that enter at one moment; noted as they do."""

    def __init__(
        self, costs: CostModel, work: IterationWork, chats: IterationWork, allowed_s: float, share: float, now: float
    ) -> None:
        """`work`: of all that run; `chats`: of the real-time requests among them."""
        self._costs = costs
        self._work = work
        self._chats = chats
        self._allowed_s = allowed_s
        self._share = share
        self._now = now

    def admits(self, candidate: Candidate) -> bool:
        """Return whether the candidate may enter beside what runs or was noted; one may that runs alone."""
        beside = self._chats if candidate.is_real_time else self._work
        if not beside.num_decodes or self._now - candidate.granted_s >= _STARVATION_S:
            return True
        trial = beside.copy()
        _add(trial, candidate)
        return self._costs.iteration_s(trial) <= self._allowed_s

    def note(self, candidate: Candidate) -> None:
        _add(self._work, candidate)
        if not candidate.is_real_time:
            return
        _add(self._chats, candidate)
        tpot_s = candidate.request.slo.tpot_s
        if tpot_s is not None:
            self._allowed_s = min(self._allowed_s, self._share * tpot_s)


class Admission:
    """The bound of one worker. Reads its table, and changes nothing."""

    def __init__(self, table: RequestTable, costs: CostModel, share: float) -> None:
        """`share`: of an objective that an iteration may take; the rest is for errors of the cost model."""
        self._table = table
        self._costs = costs
        self._share = share

    def within(
        self,
        candidates: Iterable[Candidate],
        loading: Iterable[Candidate],
        now: float,
        *,
        by_floor: RequestId | None = None,
    ) -> Iterator[Candidate]:
        """Return the candidates that may enter beside running and loading requests, up to the first that may not.

        Real-time candidates go first; among them, those that can still hold their mean gap. `by_floor`: goes before
        all, and holds up none of them.
        """
        table, work, chats, least_s = self._table, IterationWork(), IterationWork(), self._least_s()
        note_decodes(work, table, np.flatnonzero(table.num_blocks > 0))
        note_decodes(chats, table, np.flatnonzero((table.num_blocks > 0) & table.is_real_time))
        room = AdmissionRoom(self._costs, work, chats, self._share * self._tightest_s(), self._share, now)
        for candidate in loading:
            room.note(candidate)

        def turn(one: Candidate) -> tuple[bool, TurnClass]:
            return one.request.request_id != by_floor, _class_of(one, now, least_s=least_s)

        for candidate in sorted(candidates, key=turn):
            if room.admits(candidate):
                room.note(candidate)
                yield candidate
            elif candidate.request.request_id != by_floor:
                return

    def _least_s(self) -> float:
        work = IterationWork()
        work.add_decode(0)
        return self._costs.iteration_s(work)

    def _tightest_s(self) -> float:
        table = self._table
        counts = table.is_real_time & (table.num_blocks > 0) & (self._share * table.tpot_s >= self._least_s())
        return float(np.min(table.tpot_s, where=counts, initial=np.inf))


def _add(work: IterationWork, candidate: Candidate) -> None:
    work.add_decode(candidate.context_len, is_constrained=bool(candidate.request.sampling.grammar))


def _class_of(candidate: Candidate, now: float, *, least_s: float) -> TurnClass:
    request, tpot_s = candidate.request, candidate.request.slo.tpot_s
    if not candidate.is_real_time:
        return TurnClass.BEST_EFFORT
    if tpot_s is None:
        return TurnClass.LATE
    num_generated = len(candidate.generated_token_ids)
    expected = candidate.predicted_output_len or request.sampling.max_tokens
    num_left = max(expected - num_generated, 1.0)
    due_s = candidate.first_token_s + (num_generated + num_left - 1) * tpot_s
    # One that is late waits no longer than the pool lets it, or those on time would keep it from ever entering.
    is_overdue = now - candidate.granted_s >= OVERDUE_S
    return TurnClass.ON_TIME if is_overdue or due_s - now >= num_left * least_s else TurnClass.LATE
