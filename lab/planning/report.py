"""The report of a plan: one self-contained page, with the frontier as a plot, and the same figures as plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor
from typing import Any

from alignedserve.core.metrics import in_percent
from lab.planning.candidates import Candidate
from lab.planning.plan import Plan, Tried, Variation
from lab.planning.trials import HOPELESS, Outcome
from lab.sim.report.document import document, figure, named_values, table
from lab.sim.report.svg import (
    MAX_STYLES,
    PlotFrame,
    Scale,
    dash,
    element,
    from_zero,
    mark,
    path,
    shown,
    swatch,
)
from lab.sim.report.tables import NOTHING, Table
from lab.sim.result import ALL, CURVE_PERCENTS, ClassResult


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan, its request, and the configuration file that starts the plan."""

    about: Sequence[tuple[str, str]]
    plan: Plan
    config_file: str | None  # None: there is nothing to start
    warnings: Sequence[str] = ()

    @property
    def unit(self) -> str:
        return cost_unit(self.plan.nearest.candidate)


def cost_unit(candidate: Candidate) -> str:
    if candidate.offer.price_per_hour is not None:
        return "per hour"
    return "workers" if candidate.offer.is_profiled else "accelerators"


def priced(candidate: Candidate) -> str:
    if candidate.offer.price_per_hour is not None:
        return f"{candidate.cost:.2f} per hour"
    unit = cost_unit(candidate)
    return f"{candidate.num_accelerators} {unit if candidate.num_accelerators > 1 else unit.removesuffix('s')}"


def percent(share: float) -> str:
    return f"{100.0 * share:.6g} %"


def attained_words(plan: Plan, row: Tried) -> str:
    if row.outcome.error is not None:
        return "failed"
    if row.outcome.is_abandoned:
        is_exact = plan.groups and row.outcome.is_whole
        return f"below {percent(plan.goals.share if is_exact else min(plan.goals.share, HOPELESS))}"
    behind = "" if row.outcome.keeps_up else ", falls behind"
    return f"{in_percent(row.outcome.attained)}{behind}"


def played_words(outcome: Outcome) -> str:
    if outcome.windows is None:
        return "all"
    num_played, num_chosen = outcome.windows
    if num_played == num_chosen:
        return f"{num_chosen} windows"
    return "busiest window" if num_played == 1 else f"{num_played} of {num_chosen} windows"


def summary(plan: Plan) -> list[str]:
    """Return the plan in a few sentences, for the terminal and the head of the page."""
    goal, near = plan.goals.share, plan.nearest
    lines = []
    if plan.chosen is not None:
        candidate = plan.chosen.candidate
        lines.append(
            f"Plan: {candidate.label}, {priced(candidate)}. It attains {in_percent(near.outcome.attained, 2)} "
            f"(asked for {percent(goal)})."
        )
    else:
        lines.append(
            f"No plan that can be started holds the objectives of {percent(goal)} of the requests. Nearest: "
            f"{near.candidate.label}, {attained_words(plan, near)}."
        )
        if near.outcome.error is not None:
            lines.append(f"Why it failed: {near.outcome.error}")
        lines += _what_would(plan)
    low, high = (in_percent(bound, 2) for bound in plan.interval)
    lines.append(f"90 % interval of what it attains with other traffic of this kind: {low} to {high}.")
    if plan.simulated_only is not None:
        candidate = plan.simulated_only.candidate
        lines.append(
            f"{candidate.label} would hold for {priced(candidate)}, but can only be simulated: no server knows how "
            "long answers will be."
        )
    return lines


def _what_would(plan: Plan) -> list[str]:
    lines = [f"It would hold with {variation.words}." for variation in plan.variations if variation.holds][:2]
    result = plan.nearest.outcome.result
    needed = _percentile_for(plan.goals.share)
    for name, measures in sorted(result.classes.items()) if result is not None else ():
        if name in plan.goals.bounded and measures.ttft_s is not None and measures.tpot_s is not None:
            ttft_s, tpot_s = _at(measures, needed)
            lines.append(
                f"It holds TTFT {shown(ttft_s)} s and TPOT {shown(tpot_s)} s for {percent(plan.goals.share)} of "
                f"class {name}."
            )
    return lines


def _percentile_for(share: float) -> float:
    return 100.0 * (1.0 - (1.0 - share) / 2.0)


def _at(measures: ClassResult, percent: float) -> tuple[float, float]:
    from_curves = []
    for measure in (measures.ttft_s, measures.tpot_s):
        assert measure is not None, "asked for by the caller"
        index = next(number for number, sampled in enumerate(CURVE_PERCENTS) if sampled >= percent - 1e-9)
        from_curves.append(measure.curve[index])
    return from_curves[0], from_curves[1]


# --- the page


def plan_page(report: PlanReport) -> str:
    plan = report.plan
    sentences = "".join(element("p", escape(line)) for line in [*summary(plan), *report.warnings])
    parts = [
        named_values(report.about),
        element("h2", "The plan"),
        sentences,
        element("h2", "What more or less money attains"),
        element("p", _FRONTIER_WORDS, class_="soft"),
        _legend(plan),
        figure(frontier_plot(report), is_wide=True),
        table(candidates_table(plan), "All plans that were simulated", is_open=True),
        element("h2", "Under other circumstances"),
        table(variations_table(plan), "The plan, varied", is_open=True),
        element("h2", "How far to trust it"),
        element("ul", *(element("li", escape(line)) for line in plan.cautions)),
    ]
    if report.config_file is not None:
        parts += [
            element("h2", "The file that starts it"),
            element("pre", escape(report.config_file)),
        ]
    if plan.skipped:
        rows = [[label, reason] for label, reason in plan.skipped]
        parts.append(table(Table(("plan", "why not"), rows, 2), "Not considered"))
    return document("AlignedServe: plan", "".join(parts))


_FRONTIER_WORDS = (
    "Every mark is a simulated plan: its cost, and the share of requests within their objectives (of the class that "
    "attains least). The line joins plans that attain more than every cheaper one. Faint marks are of the busiest "
    "windows of the workload only, where the search had seen enough: of the whole such plans attain more. The dashed "
    "line is the share asked for; plans that were abandoned before the end stand in the table alone."
)


def _groups(plan: Plan) -> list[str]:
    return list(dict.fromkeys(_group(trial.candidate) for trial in plan.tried))


def _group(candidate: Candidate) -> str:
    degree = f", {candidate.worker_size} accelerators a worker" if candidate.worker_size > 1 else ""
    return f"{candidate.topology.value}, {candidate.policy.label}{degree}"


def _legend(plan: Plan) -> str:
    entries = [element("li", swatch(number), escape(name)) for number, name in enumerate(_groups(plan))]
    return element("ul", *entries, class_="legend", aria_label="topologies and policies")


def frontier_plot(report: PlanReport) -> str:
    plan = report.plan
    known = [trial for trial in plan.tried if not trial.outcome.is_abandoned and trial.outcome.error is None]
    shown_ones = sorted(known, key=lambda trial: trial is plan.nearest)  # drawn last, above its equals
    costs = [trial.candidate.cost for trial in shown_ones]
    least = min((trial.outcome.attained for trial in shown_ones), default=0.0)
    shares = Scale(max(floor(10.0 * min(least, plan.goals.share) - 1e-9), 0) / 10.0, 1.0)
    label = "price per hour" if report.unit == "per hour" else report.unit
    frame = PlotFrame(from_zero(costs), shares, label, "requests within objectives", width=900, height=340)
    groups, goal = _groups(plan), plan.goals.share
    ends = [frame.at(0.0, goal), frame.at(frame.x.high, goal)]
    frontier = [frame.at(trial.candidate.cost, trial.outcome.attained) for trial in plan.frontier()]
    marks = []
    for trial in shown_ones:
        style = groups.index(_group(trial.candidate))
        words = f"{trial.candidate.label}: {in_percent(trial.outcome.attained)}, {priced(trial.candidate)}"
        position = frame.at(trial.candidate.cost, trial.outcome.attained)
        faint = {} if trial.outcome.is_representative else {"opacity": "0.45"}
        marks.append(element("g", mark(style, *position, words), class_=f"s{style % MAX_STYLES}", **faint))
    chosen = frame.at(plan.nearest.candidate.cost, plan.nearest.outcome.attained)
    ring = element("circle", cx=chosen[0], cy=chosen[1], r=9, class_="curve")
    lines = [element("path", d=path(ends), class_="curve", stroke_dasharray=dash(MAX_STYLES))]
    if len(frontier) > 1:
        lines.append(element("path", d=path(frontier), class_="curve"))
    return frame.picture("attained against cost", frame.axes(y_is_share=True), *lines, *marks, ring)


def sorted_plans(plan: Plan) -> list[Tried]:
    """Return all plans that were simulated, the cheapest first."""
    return sorted(plan.tried, key=lambda trial: (trial.candidate.cost, -trial.outcome.attained, trial.candidate.label))


def candidates_table(plan: Plan) -> Table:
    """Build a row per plan, the cheapest first."""
    rows = [[_marked(plan, trial), *_figures(plan, trial)] for trial in sorted_plans(plan)]
    headings = ("plan", "cost", "attained", "of", "TTFT p99", "TPOT p99", "tokens/s", "busy", "starts")
    return Table(headings, rows, 1)


def _marked(plan: Plan, trial: Tried) -> str:
    return f"> {trial.candidate.label}" if trial is plan.nearest else trial.candidate.label


def _figures(plan: Plan, trial: Tried) -> list[str]:
    result = trial.outcome.result
    measures = None if result is None else result.classes[ALL]
    cells = [f"{trial.candidate.cost:g}", attained_words(plan, trial), played_words(trial.outcome)]
    if result is None or measures is None or trial.outcome.is_abandoned:
        cells += [NOTHING] * 4
    else:
        cells += [
            f"{measure.distribution.p99:.3f} s" if measure is not None else NOTHING
            for measure in (measures.ttft_s, measures.tpot_s)
        ]
        busy = sum(worker.utilisation for worker in result.workers) / max(len(result.workers), 1)
        cells += [f"{measures.tokens_per_s:,.0f}", in_percent(busy, 0)]
    return [*cells, "yes" if trial.candidate.can_be_served else "simulated only"]


def variations_table(plan: Plan) -> Table:
    rows = [
        [
            variation.words,
            NOTHING if variation.outcome.is_abandoned else in_percent(variation.outcome.attained),
            played_words(variation.outcome),
            "holds" if variation.holds else "does not hold",
        ]
        for variation in plan.variations
    ]
    return Table(("with", "attained", "of", ""), rows, 1)


# --- plain values


def plan_values(report: PlanReport) -> dict[str, Any]:
    """Return everything as plain JSON."""
    plan = report.plan
    frontier = {tried.candidate.label for tried in plan.frontier()}
    return {
        "about": dict(report.about),
        "warnings": list(report.warnings),
        "share": plan.goals.share,
        "is_held": plan.is_held,
        "plan": None if plan.chosen is None else _values(plan, plan.chosen),
        "nearest": _values(plan, plan.nearest),
        "simulated_only": None if plan.simulated_only is None else _values(plan, plan.simulated_only),
        "interval": plan.interval._asdict(),
        "cautions": list(plan.cautions),
        "variations": [_variation_values(variation) for variation in plan.variations],
        "windows": [
            {
                "start_s": group.window.start_s,
                "end_s": group.window.end_s,
                "num_requests": sum(group.num_requests.values()),
                "stands_for": group.num_windows,
            }
            for group in plan.groups
        ],
        "candidates": [{**_values(plan, row), "is_on_frontier": row.candidate.label in frontier} for row in plan.tried],
        "skipped": [{"plan": label, "reason": reason} for label, reason in plan.skipped],
        "num_simulations": plan.num_simulations,
        "summary": summary(plan),
        "config_file": report.config_file,
    }


def _variation_values(variation: Variation) -> dict[str, Any]:
    return {
        "words": variation.words,
        "attained": None if variation.outcome.is_abandoned else variation.outcome.attained,
        "of": played_words(variation.outcome),
        "holds": variation.holds,
    }


def _values(plan: Plan, row: Tried) -> dict[str, Any]:
    candidate, outcome = row.candidate, row.outcome
    classes = outcome.result.classes if outcome.result is not None and not outcome.is_abandoned else {}
    return {
        "name": candidate.label,
        "hardware": candidate.offer.name,
        "num_accelerators": candidate.num_accelerators,
        "tensor_parallel": candidate.tensor_parallel,
        "pipeline_parallel": candidate.pipeline_parallel,
        "expert_parallel": candidate.expert_parallel,
        "topology": candidate.topology.value,
        "num_prefill": candidate.num_prefill,
        "num_decode": candidate.num_decode,
        "policy": candidate.policy.name,
        "policy_params": dict(candidate.policy.params),
        "cost": candidate.cost,
        "can_be_served": candidate.can_be_served,
        "is_whole": outcome.is_whole,
        "num_windows": None if outcome.windows is None else outcome.windows.num_played,
        "is_abandoned": outcome.is_abandoned,
        "attained": None if outcome.is_abandoned else outcome.attained,
        "holds": outcome.holds,
        "keeps_up": outcome.keeps_up,
        "error": outcome.error,
        "straggler_share": None if outcome.result is None else outcome.result.iteration_log.straggler_share,
        "classes": {
            name: {
                "attained": class_values.attainment,
                "ttft_p99_s": None if class_values.ttft_s is None else class_values.ttft_s.distribution.p99,
                "tpot_p99_s": None if class_values.tpot_s is None else class_values.tpot_s.distribution.p99,
                "requests_per_s": class_values.requests_per_s,
                "tokens_per_s": class_values.tokens_per_s,
            }
            for name, class_values in classes.items()
        },
    }
