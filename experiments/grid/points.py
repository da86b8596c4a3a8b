"""The points of the grid: their workloads, and the order in which they are simulated."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from experiments.common import line
from experiments.steady import LEAST_S, LEAST_SEEDS
from lab.sim.sweep import WorkloadLine

MAX_TOTAL = 16_000  # tokens of prompt and answer together: with scaled positions, and so that every worker holds it
OUTSTANDING = 8  # best-effort requests for each accelerator
SEEDS = tuple(range(1, LEAST_SEEDS + 1))
MINUTES = LEAST_S / 60


@dataclass(frozen=True, slots=True)
class Trace:
    """Lengths, what is served beside them, and the scale of objectives and rates."""

    ttft_s: float  # tight
    capacity: float  # requests/s of one accelerator: `python -m experiments.grid --capacity`
    beside: str = "arxiv"


TRACES: Mapping[str, Trace] = {
    "azure_conv": Trace(1.0, 2.2),
    "azure_code": Trace(2.0, 1.55),
    "mooncake": Trace(8.0, 0.37),
    "arxiv": Trace(2.0, 1.45, "azure_code"),
    "sharegpt": Trace(1.0, 0.52),
}
LOADS = (0.54, 0.78, 1.02, 1.26, 1.5)  # shares of the capacity
TIGHT, MIXED = "tight", "mixed"  # looser ones were held by all at every load that was tried
OBJECTIVES = (TIGHT, MIXED)
ACCELERATORS = (2, 4)
_TPOT_S, _LOOSER = 0.05, 4


@dataclass(frozen=True, slots=True)
class Point:
    """One workload on a number of accelerators."""

    trace: str
    load: float
    objectives: str
    accelerators: int
    has_best_effort: bool
    seed: int = SEEDS[0]
    minutes: float = MINUTES

    @property
    def name(self) -> str:
        """Return its name in records and on the command line: `sharegpt/0.54/tight/4/be`; other seeds are named."""
        beside = "be" if self.has_best_effort else "alone"
        seed = f"/seed{self.seed}" if self.seed != SEEDS[0] else ""
        minutes = f"/{self.minutes:g}min" if self.minutes != MINUTES else ""
        return f"{self.trace}/{self.load:g}/{self.objectives}/{self.accelerators}/{beside}{minutes}{seed}"

    @property
    def rate(self) -> float:
        """Return the requests per second of the trace, before those too long are left out."""
        return round(self.load * TRACES[self.trace].capacity * self.accelerators, 3)

    @property
    def arrivals_s(self) -> float:
        return 60 * self.minutes

    def of_seed(self, seed: int) -> "Point":
        return replace(self, seed=seed)

    def workload(self) -> WorkloadLine:
        trace = TRACES[self.trace]
        text = f"rt: {self.trace}, max_total={MAX_TOTAL}, arrivals=gamma, rate={self.rate:g}, {self._objectives()}"
        if self.has_best_effort:
            text += f"; be: {trace.beside}, max_total={MAX_TOTAL}, outstanding={OUTSTANDING * self.accelerators}"
        return line(text, self.seed, duration_s=self.arrivals_s)

    def _objectives(self) -> str:
        ttft_s, tpot_s = TRACES[self.trace].ttft_s, _TPOT_S
        if self.objectives == MIXED:  # each drawn for itself
            return f"ttft=choice({ttft_s:g},{_LOOSER * ttft_s:g}), tpot=choice({tpot_s:g},{_LOOSER * tpot_s:g})"
        return f"ttft={ttft_s:g}, tpot={tpot_s:g}"


def all_points(minutes: float = MINUTES) -> list[Point]:
    """Return every point, in blocks of twenty that are each a fair sample: those of two accelerators before the others.

    In a block every trace meets both kinds of objectives, with and without best-effort work, at one load each; the five
    loads are spread evenly over them, and each block has others. Within a block the order is shuffled, so that a part
    of it is fair as well.
    """
    shuffled = []
    for accelerators, number in product(ACCELERATORS, range(len(LOADS))):
        block = [replace(point, minutes=minutes) for point in _block(accelerators, number)]
        random.Random(number).shuffle(block)
        shuffled += block
    return shuffled


def _block(accelerators: int, block: int) -> Iterator[Point]:
    for (trace, name), (wish, objectives), beside in product(enumerate(TRACES), enumerate(OBJECTIVES), (False, True)):
        load = LOADS[(_FIRST[block] + trace + 2 * wish + 3 * beside) % len(LOADS)]
        yield Point(name, load, objectives, accelerators, beside)


_FIRST = (2, 0, 3, 1, 4)  # loads of the first combination: far apart in succession
