"""Follows while a simulation runs which requests meet their objectives, to end it once enough is known."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lab.sim.records import OpenRequest, RequestRecord


class MissWatch:
    """The requests of each class that certainly miss their objectives: ended without, or open and too late for them.

    Clients know how long their answers are: a mean gap is missed as soon as even an answer that ended now has it.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = limits
        self._ended: Counter[str] = Counter()
        self._num_seen = 0

    def is_over(self, records: Sequence[RequestRecord], under_way: Iterable[OpenRequest], now: float) -> bool:
        """Return whether more requests miss than a limit allows. `records`: all that have ended, in their order."""
        for record in records[self._num_seen :]:
            self._ended[record.class_name] += not record.has_met_slo
        self._num_seen = len(records)
        missed = Counter(self._ended)
        missed.update(request.timed.class_name for request in under_way if _is_late(request, now))
        return any(missed[name] > limit for name, limit in self._limits.items())

    def is_settled(self, under_way: Iterable[OpenRequest], now: float) -> bool:
        return all(_is_late(request, now) for request in under_way if request.timed.class_name in self._limits)


def _is_late(request: OpenRequest, now: float) -> bool:
    slo, times, arrival_s = request.timed.slo, request.token_times_s, request.arrival_s
    first_s = times[0] if times else now
    if slo.ttft_s is not None and first_s > arrival_s + slo.ttft_s:
        return True
    if slo.deadline_s is not None and now > arrival_s + slo.deadline_s:
        return True
    return slo.tpot_s is not None and now - first_s > slo.tpot_s * max(request.timed.output_len - 1, 1)
