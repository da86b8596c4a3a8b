"""The windows of a workload that stand for all of it.

A plan that misses objectives misses them in the busiest minutes. So a workload is cut into windows of about a minute,
which are sorted by their load and dealt out to groups: the busiest window, the next 2, the next 4, and so on. Of each
group the window in its middle is simulated: sampling with a share that falls with the load. What is missed in the whole
is estimated group by group, as in any stratified sample.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, nextafter

from lab.planning.loads import UnitCosts
from lab.workload.requests import TimeWindow, Workload, window_of


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """Sizes of windows. Each begins with a lead-in, which is played and not counted."""

    least_s: float = 60.0
    lead_in_s: float = 30.0
    least_requests: int = 200  # on average
    least_windows: int = 10  # of a workload; a shorter one is simulated as a whole


@dataclass(frozen=True, slots=True)
class Group:
    """Windows of about equal load, and the one of them that is simulated."""

    window: TimeWindow
    num_windows: int
    num_requests: Mapping[str, int]  # in that window, by class; closed loops do not count
    total_requests: Mapping[str, int]  # in all windows of the group
    load_s: float  # of that window


def groups_of(workload: Workload, costs: UnitCosts, sizes: WindowSizes) -> tuple[Group, ...]:
    """Return the groups, the busiest first; none where the workload is too short for windows to spare time."""
    requests = workload.requests
    if not requests:
        return ()
    span_s = nextafter(requests[-1].arrival_s, inf)  # the last one comes within it
    num_windows = int(min(span_s / sizes.least_s, len(requests) / sizes.least_requests))
    if num_windows < sizes.least_windows:
        return ()
    edges = [span_s * number / num_windows for number in range(num_windows)] + [span_s]
    windows = [TimeWindow(start_s, end_s, sizes.lead_in_s) for start_s, end_s in pairwise(edges)]
    parts = [window_of(workload, TimeWindow(window.start_s, window.end_s)).requests for window in windows]
    counts = [Counter(request.class_name for request in part) for part in parts]
    loads = [costs.of(part).total_s for part in parts]
    by_load = sorted(range(num_windows), key=lambda number: (-loads[number], number))
    groups = []
    for members in _dealt(by_load):
        middle = members[len(members) // 2]
        totals = sum((counts[number] for number in members), Counter())
        groups.append(Group(windows[middle], len(members), counts[middle], totals, loads[middle]))
    return tuple(groups)


def _dealt(windows: Sequence[int]) -> list[Sequence[int]]:
    found, size = [], 1
    while windows:
        taken = size if len(windows) >= 2 * size else len(windows)
        found.append(windows[:taken])
        windows, size = windows[taken:], 2 * size
    return found
