"""The order in which the jobs of a prefill worker get places and blocks.

That of classes, as everywhere: real-time jobs that can still have their first token in time, then late ones, then
best-effort ones, each in order of arrival. A late one that is overdue goes before those on time by a floor
(core/class_floor.py).
"""

from collections.abc import Iterable

from alignedserve.core.class_floor import OverdueFloor
from alignedserve.core.turn_class import TurnClass
from prefill_worker.state import JobStage, PrefillJob


class PlaceOrder:
    """Orders waiting jobs, and counts for the floor those that got a place."""

    def __init__(self, *, knows_classes: bool) -> None:
        """`knows_classes`: where the policy does; else all go in order of arrival."""
        self.knows_classes = knows_classes
        self._floor = OverdueFloor()
        self._late: PrefillJob | None = None  # the first of the late ones that wait

    def of(self, jobs: Iterable[PrefillJob], now: float) -> list[PrefillJob]:
        """Return the jobs without blocks, in their order."""
        waiting = [job for job in jobs if job.stage is JobStage.WAITING]
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
        return waiting

    def note(self, job: PrefillJob, now: float) -> None:
        """Note a job of the order last given that has got a place."""
        if not self.knows_classes:
            return
        turn_class = _class_of(job, now)
        if turn_class is TurnClass.LATE:
            self._floor.note_own(job.context_len)
        elif turn_class is TurnClass.ON_TIME and self._late is not None:
            self._floor.note_earlier(job.context_len, self._late.context_len)


def _class_of(job: PrefillJob, now: float) -> TurnClass:
    if not job.is_real_time:
        return TurnClass.BEST_EFFORT
    return TurnClass.LATE if job.turn_due_s <= now else TurnClass.ON_TIME
