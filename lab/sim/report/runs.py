"""The data of a report."""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.sim.engine import IterationLine
from lab.sim.result import ALL, ClassResult, SimulationResult

WINDOW_S = 8.0  # of one worker's timeline that is shown


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One policy at one rate: its result, or its error."""

    policy: str
    rate: float  # requests per second that were offered
    num_blocks: int  # of the worker whose timeline was kept
    result: SimulationResult | None
    error: str | None = None

    def of_class(self, name: str) -> ClassResult | None:
        """Return the result of a class; None if the run failed or had no such requests."""
        return None if self.result is None else self.result.classes.get(name)


@dataclass(frozen=True, slots=True)
class Report:
    """A sweep. `about`: names and values that describe what was simulated, and where."""

    title: str
    about: Sequence[tuple[str, str]]
    runs: Sequence[ReportedRun]

    @property
    def policies(self) -> list[str]:
        """Return the policies in order of appearance."""
        return list(dict.fromkeys(run.policy for run in self.runs))

    @property
    def rates(self) -> list[float]:
        return sorted({run.rate for run in self.runs})

    @property
    def classes(self) -> list[str]:
        """Return "all", then each class if there are several."""
        named = {name for run in self.runs if run.result is not None for name in run.result.classes}
        others = sorted(named - {ALL})
        return [ALL, *others] if len(others) > 1 else [ALL]

    def style_of(self, policy: str) -> int:
        """Return the index of the policy's colour and mark."""
        return self.policies.index(policy)

    def at_rate(self, rate: float) -> list[ReportedRun]:
        """Return all policies' runs at this rate."""
        return [run for run in self.runs if run.rate == rate]


def window_of(timeline: Sequence[IterationLine]) -> list[IterationLine]:
    """Return the iterations of WINDOW_S seconds in the middle, with times from their beginning."""
    if not timeline:
        return []
    begins, ends = timeline[0].started_s, timeline[-1].ended_s
    first = max(begins, (begins + ends - WINDOW_S) / 2)
    return [
        line._replace(started_s=line.started_s - first, ended_s=line.ended_s - first)
        for line in timeline
        if first <= line.started_s and line.ended_s <= first + WINDOW_S
    ]
