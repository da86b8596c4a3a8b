"""The points of the grid: their workloads, and the order in which they are simulated."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from alignedserve.sim.sweep import WorkloadLine
from experiments.common import line

MAX_TOTAL = 16_000  # tokens of prompt and answer together: with scaled positions, and so that every worker holds it
OUTSTANDING = 8  # best-effort requests for each accelerator
SEEDS = (1, 2, 3)  # the first: of every point
_START_S = 300  # of a recording, for each seed: another part of it


@dataclass(frozen=True, slots=True)
class Trace:
    """Lengths and arrivals, what is served beside them, and the scale of objectives and rates."""

    ttft_s: float  # tight
    capacity: float  # requests/s of one accelerator: `python -m experiments.grid --capacity`
    beside: str = "arxiv"
    is_timed: bool = True  # or drawn: Mooncake's come in lumps of a few seconds, at its own rate of many machines
    longer: int = 1  # as few requests come


TRACES: Mapping[str, Trace] = {
    "azure_conv": Trace(1.0, 2.2),
    "azure_code": Trace(2.0, 1.55),
    "mooncake": Trace(8.0, 0.37, is_timed=False, longer=2),
    "arxiv": Trace(2.0, 1.45, "azure_code", is_timed=False),
    "sharegpt": Trace(1.0, 0.52, is_timed=False, longer=2),
}
LOADS = (0.3, 0.54, 0.78, 1.02, 1.26, 1.5)  # shares of the capacity
TIGHT, LOOSE, MIXED = "tight", "loose", "mixed"
OBJECTIVES = (TIGHT, LOOSE, MIXED)
ACCELERATORS = (2, 4, 8)
_TPOT_S, _LOOSER = 0.05, 4
_ARRIVALS_S: Mapping[int, float] = {2: 40.0, 4: 25.0, 8: 15.0}


@dataclass(frozen=True, slots=True)
class Point:
    """One workload on a number of accelerators."""

    trace: str
    load: float
    objectives: str
    accelerators: int
    has_best_effort: bool
    seed: int = SEEDS[0]

    @property
    def name(self) -> str:
        """Return its name in records and on the command line: `sharegpt/0.54/tight/4/be`; other seeds are named."""
        beside = "be" if self.has_best_effort else "alone"
        seed = f"/seed{self.seed}" if self.seed != SEEDS[0] else ""
        return f"{self.trace}/{self.load:g}/{self.objectives}/{self.accelerators}/{beside}{seed}"

    @property
    def rate(self) -> float:
        """Return the requests per second of the trace, before those too long are left out."""
        return round(self.load * TRACES[self.trace].capacity * self.accelerators, 3)

    @property
    def arrivals_s(self) -> float:
        """Return for how many seconds requests arrive."""
        return _ARRIVALS_S[self.accelerators] * TRACES[self.trace].longer

    def workload(self) -> WorkloadLine:
        """Return the real-time requests of the trace, class `rt`, and what is served beside them, class `be`."""
        trace = TRACES[self.trace]
        when = f"arrivals=recorded, start={_START_S * self.seed}" if trace.is_timed else "arrivals=gamma"
        text = f"rt: {self.trace}, max_total={MAX_TOTAL}, {when}, rate={self.rate:g}, {self._objectives()}"
        if self.has_best_effort:
            text += f"; be: {trace.beside}, max_total={MAX_TOTAL}, outstanding={OUTSTANDING * self.accelerators}"
        return line(text, self.seed, duration_s=self.arrivals_s)

    def _objectives(self) -> str:
        ttft_s, tpot_s = TRACES[self.trace].ttft_s, _TPOT_S
        if self.objectives == MIXED:  # each drawn for itself
            return f"ttft=choice({ttft_s:g},{_LOOSER * ttft_s:g}), tpot=choice({tpot_s:g},{_LOOSER * tpot_s:g})"
        factor = _LOOSER if self.objectives == LOOSE else 1
        return f"ttft={factor * ttft_s:g}, tpot={factor * tpot_s:g}"


def all_points() -> list[Point]:
    """Return every point, in six blocks of ninety that are each a fair sample of the whole.

    In a block every trace meets all objectives, numbers of accelerators, with and without best-effort work, at one load
    each; the six loads are spread evenly over them, and each block has others. Within a block the order is shuffled, so
    that a part of it is fair as well.
    """
    shuffled = []
    for number in range(len(LOADS)):
        block = list(_block(number))
        random.Random(number).shuffle(block)
        shuffled += block
    return shuffled


def _block(block: int) -> Iterator[Point]:
    factors = (ACCELERATORS, OBJECTIVES, (False, True), TRACES)
    for places in product(*(range(len(factor)) for factor in factors)):
        (machine, wish, beside, trace), levels = places, [tuple(factor) for factor in factors]
        load = LOADS[(_FIRST[block] + machine + 2 * wish + 3 * beside + trace) % len(LOADS)]
        yield Point(str(levels[3][trace]), load, OBJECTIVES[wish], ACCELERATORS[machine], bool(beside))


_FIRST = (3, 0, 4, 1, 5, 2)  # loads of the first combination: far apart in succession
