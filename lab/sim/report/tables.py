"""The figures of a report as tables, for the terminal and below every plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from alignedserve.core.metrics import READABLE_GAP_S, in_percent
from lab.sim.engine import IterationLine
from lab.sim.report.svg import shown
from lab.sim.result import ALL, ClassResult, Measure, SimulationResult

WINDOW_S = 8.0  # of one worker's timeline that is shown


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A policy at a rate: the result or the error."""

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


NOTHING = "–"  # noqa: RUF001  # a dash in a table


class Table(NamedTuple):
    """Formatted cells. The first `num_names` columns are names, the others quantities."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_names: int = 1


_HEADLINES = (
    "attained",
    "TTFT p50",
    "TTFT p99",
    "TBT p99",
    "done/s",
    "tokens/s",
    "goodput/s",
    "busy",
    "preempted",
)


def headlines(report: Report) -> Table:
    """Build a row per run, and one per class if there are several.

    Told where there are any: tokens computed again, and the share of prompt tokens that the prefix cache had.
    """
    has_classes = len(report.classes) > 1
    has_hits = any(run.result.classes[ALL].num_cached_tokens for run in report.runs if run.result is not None)
    has_again = any(run.result.num_recomputed_tokens for run in report.runs if run.result is not None)
    rows = [
        [run.policy, shown(run.rate), *([name] if has_classes else []), *_headline_cells(run, name)]
        + ([_recomputed(run, name)] if has_again else [])
        + ([_hit_rate(run, name)] if has_hits else [])
        for run in report.runs
        for name in report.classes
    ]
    names = ("policy", "rate", *(("class",) if has_classes else ()))
    shown_headings = [heading for heading, is_told in (("tokens again", has_again), ("cached", has_hits)) if is_told]
    return Table((*names, *_HEADLINES, *shown_headings), rows, len(names))


def steadiness(report: Report) -> Table:
    """Build the same rows of what a mean hides: answers that stood still, missed token deadlines, queues that grow."""
    has_classes = len(report.classes) > 1
    names = ("policy", "rate", *(("class",) if has_classes else ()))
    rows = [
        [run.policy, shown(run.rate), *([name] if has_classes else []), *_steadiness_cells(run.of_class(name))]
        for run in report.runs
        for name in report.classes
    ]
    measures = ("longest gap", f"gap over {READABLE_GAP_S:g} s", "token deadlines met", "completed of sent")
    return Table((*names, *measures), rows, len(names))


def _steadiness_cells(of_class: ClassResult | None) -> list[str]:
    if of_class is None:
        return [NOTHING] * 4
    longest = NOTHING if of_class.longest_gap_s is None else _duration(of_class.longest_gap_s)
    return [longest, _percent(of_class.stalled), _percent(of_class.fluidity), _percent(of_class.completed_of_arrived)]


def _percent(share: float | None) -> str:
    return NOTHING if share is None else in_percent(share)


def _recomputed(run: ReportedRun, class_name: str) -> str:
    if run.result is None:
        return NOTHING
    return f"{run.result.num_recomputed_tokens:,}" if class_name == ALL else ""


def _hit_rate(run: ReportedRun, class_name: str) -> str:
    measures = run.of_class(class_name)
    return NOTHING if measures is None or measures.hit_rate is None else in_percent(measures.hit_rate)


def _headline_cells(run: ReportedRun, class_name: str) -> list[str]:
    measures = run.of_class(class_name)
    if run.result is None or measures is None:
        return ["failed" if run.result is None else NOTHING, *[NOTHING] * (len(_HEADLINES) - 1)]
    of_all = (in_percent(mean_utilisation(run.result), 0), f"{run.result.num_preemptions:,}")
    return [*_class_cells(measures), *(of_all if class_name == ALL else ("", ""))]


def _class_cells(of_class: ClassResult) -> list[str]:
    return [
        _percent(of_class.attainment),
        *_seconds(of_class.ttft_s, 50, 99),
        *_seconds(of_class.tbt_s, 99),
        f"{of_class.requests_per_s:.2f}",
        f"{of_class.tokens_per_s:,.0f}",
        f"{of_class.goodput_per_s:.2f}",
    ]


def mean_utilisation(result: SimulationResult) -> float:
    return sum(worker.utilisation for worker in result.workers) / max(len(result.workers), 1)


def distributions(runs: Sequence[ReportedRun], class_name: str) -> Table:
    rows = []
    for run in runs:
        measures = run.of_class(class_name)
        ttft_s, tbt_s = (None, None) if measures is None else (measures.ttft_s, measures.tbt_s)
        rows.append([run.policy, *_seconds(ttft_s, 50, 90, 99, 100), *_seconds(tbt_s, 50, 90, 99, 100)])
    parts = [f"{measure} {part}" for measure in ("TTFT", "TBT") for part in ("p50", "p90", "p99", "max")]
    return Table(("policy", *parts), rows)


def workers(runs: Sequence[ReportedRun]) -> Table:
    rows = [
        [run.policy, worker.name, in_percent(worker.utilisation)]
        + [f"{count:,}" for count in (worker.num_iterations, worker.num_prompt_tokens, worker.num_decodes)]
        for run in runs
        if run.result is not None
        for worker in run.result.workers
    ]
    return Table(("policy", "worker", "busy", "iterations", "prompt tokens", "decodes"), rows, 2)


def windows(runs: Sequence[ReportedRun]) -> Table:
    rows = []
    for run in runs:
        lines = window_of(run.result.timeline) if run.result is not None else []
        longest_s = max((line.ended_s - line.started_s for line in lines), default=0.0)
        num_tokens = sum(line.num_prompt_tokens for line in lines)
        num_decodes = sum(line.num_decodes for line in lines)
        cells = [f"{count:,}" for count in (len(lines), num_tokens, num_decodes)]
        rows.append([run.policy, *cells, f"{longest_s * 1000:.1f} ms"])
    return Table(("policy", "iterations", "prompt tokens", "decodes", "longest iteration"), rows)


def _seconds(measure: Measure | None, *percents: int) -> list[str]:
    if measure is None:
        return [NOTHING] * len(percents)
    distribution = measure.distribution
    of_percent = {50: distribution.p50, 90: distribution.p90, 99: distribution.p99, 100: distribution.max}
    return [_duration(of_percent[percent]) for percent in percents]


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1.0 else f"{seconds:,.2f} s"
