"""Counts requests that miss their objectives while a simulation runs, to abandon one that cannot hold them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from alignedserve.sim.records import OpenRequest, RequestRecord


class MissWatch:
    """The requests of each class that certainly miss their objectives: ended without, or open past their TTFT."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        """`limits`: the most misses of a class; the others do not count."""
        self._limits = limits
        self._ended: Counter[str] = Counter()
        self._num_seen = 0

    def is_over(self, records: Sequence[RequestRecord], under_way: Iterable[OpenRequest], now: float) -> bool:
        """Return whether more requests miss than a limit allows. `records`: all that have ended, in their order."""
        for record in records[self._num_seen :]:
            self._ended[record.class_name] += not record.has_met_slo
        self._num_seen = len(records)
        missed = Counter(self._ended)
        missed.update(one.timed.class_name for one in under_way if _is_late(one, now))
        return any(missed[name] > limit for name, limit in self._limits.items())


def _is_late(request: OpenRequest, now: float) -> bool:
    ttft_s = request.timed.slo.ttft_s
    return ttft_s is not None and not request.token_times_s and now > request.arrival_s + ttft_s
