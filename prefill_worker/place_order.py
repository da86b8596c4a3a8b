"""The order in which the jobs of a prefill worker get places and blocks.

That of classes, as everywhere: real-time jobs that can still have their first token in time, then late ones, then
best-effort ones, each in order of arrival. A late one that is overdue goes before those on time by a floor
(core/class_floor.py), and so does a document that keeps waiting: the router has let it go by its own floor, and in an
overload chats wait here all the time. While two documents that have a place are not computed yet, no other comes so.
"""

from collections.abc import Iterable

from alignedserve.core.class_floor import ClassFloor, OverdueFloor, TurnClass
from prefill_worker.state import JobStage, PrefillJob

_MOST_NOT_COMPUTED = 2  # documents: one that is computed, by the floor of its policy, and one behind it


class PlaceOrder:
    """Orders waiting jobs, and counts for the floor those that got a place."""

    def __init__(self, *, knows_classes: bool, floor: float = 0.0) -> None:
        """`knows_classes`: where the policy does; else all go in order of arrival. `floor`: of best effort, as a share
        of the tokens that get a place."""
        self.knows_classes = knows_classes
        self._floor = OverdueFloor()
        self._late: PrefillJob | None = None  # the first of the late ones that wait
        self._document_floor = ClassFloor(floor)
        self._document: PrefillJob | None = None  # the first best-effort one that waits
        self.by_floor: PrefillJob | None = None  # a best-effort one that goes before all, and holds up none

    def of(self, jobs: Iterable[PrefillJob], now: float) -> list[PrefillJob]:
        waiting, placed = [], 0
        for job in jobs:
            if job.stage is JobStage.WAITING:
                waiting.append(job)
            else:
                placed += job.stage is not JobStage.DEPARTING and not job.is_real_time
        if not self.knows_classes:
            return waiting
        by_class: dict[TurnClass, list[PrefillJob]] = {one: [] for one in TurnClass}
        for job in waiting:
            by_class[_class_of(job, now)].append(job)
        waiting = [job for of_class in by_class.values() for job in of_class]
        late = self._late = next(iter(by_class[TurnClass.LATE]), None)
        if late is not None and self._floor.lets(late.context_len, late.turn_due_s, now):
            waiting.remove(late)
            waiting.insert(0, late)
        first = self._document = next(iter(by_class[TurnClass.BEST_EFFORT]), None)
        self.by_floor = None
        has_turn = first is not None and first is not waiting[0] and placed < _MOST_NOT_COMPUTED
        if first is not None and has_turn and self._document_floor.is_due(first.context_len):
            self.by_floor = first
            waiting.remove(first)
            waiting.insert(0, first)
        return waiting

    def note(self, job: PrefillJob, now: float) -> None:
        if not self.knows_classes:
            return
        turn_class = _class_of(job, now)
        if turn_class is TurnClass.BEST_EFFORT:
            self._document_floor.note_own(job.context_len)
            return
        if self._document is not None:
            self._document_floor.note_earlier(job.context_len, self._document.context_len)
        if turn_class is TurnClass.LATE:
            self._floor.note_own(job.context_len)
        elif turn_class is TurnClass.ON_TIME and self._late is not None:
            self._floor.note_earlier(job.context_len, self._late.context_len)


def _class_of(job: PrefillJob, now: float) -> TurnClass:
    if not job.is_real_time:
        return TurnClass.BEST_EFFORT
    return TurnClass.LATE if job.turn_due_s <= now else TurnClass.ON_TIME
