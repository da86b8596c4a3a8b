"""The summary of the grid, made of its record alone."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.measuring.intervals import Interval, interval
from experiments.common import Row, chosen, pick, print_table
from experiments.grid.points import SEEDS, Point, all_points
from experiments.grid.record import Outcome, Record
from experiments.grid.search import ENOUGH, finalists, is_searched
from experiments.grid.systems import DEFAULT, System, others
from experiments.steady import is_served

CLAIMED_POINTS = 1.0  # of attainment: no further behind the best of the field
FACTORS = ("trace", "load", "objectives", "accelerators", "beside")
_COLUMNS: Mapping[str, str] = {
    "point": "point",
    "rate": "requests/s",
    "default": "default %",
    "best": "best of the field %",
    "of": "which",
    "ahead": "points ahead",
    "ahead_half": "95 %",
    "gain": "goodput %",
    "default_be": "BE tokens/s",
    "best_be": "its BE",
}


class Held(NamedTuple):
    """One system at a point, over all its seeds."""

    system: str
    outcomes: Sequence[Outcome]

    @property
    def percents(self) -> list[float]:
        return [100 * one.attainment for one in self.outcomes]

    @property
    def num_met(self) -> int:
        return sum(one.num_met for one in self.outcomes)

    @property
    def is_served(self) -> bool:
        """Return whether completions keep up with arrivals: without that nothing is held."""
        return is_served([one.completed_of_arrived or 0.0 for one in self.outcomes])

    def row(self, prefix: str, arrivals_s: float) -> Row:
        found, beside = interval(self.percents), [one.best_effort_tokens_per_s for one in self.outcomes]
        known = [value for value in beside if value is not None]
        figures = {
            "": found.mean,
            "_half": found.half,
            "_goodput": self.num_met / arrivals_s,
            "_served": self.is_served,
            "_completed": mean(one.completed_of_arrived or 0.0 for one in self.outcomes),
            "_fluidity": mean(one.fluidity or 0.0 for one in self.outcomes),
            "_gap": max(one.longest_gap_s or 0.0 for one in self.outcomes),
            "_be": mean(known) if known else None,
        }
        return {f"{prefix}{name}": value for name, value in figures.items()}


def held_at(point: Point, record: Record, system: System, seeds: Sequence[int]) -> Held:
    name = system.name(point.accelerators)
    found = [record.find(point.of_seed(seed).name, name) for seed in seeds]
    return Held(name, [one for one in found if one is not None])


def summary_of(record: Record, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    points = [point for point in all_points() if is_searched(point, record, seeds)]
    rows = [row_of(point, record, seeds) for point in points]
    levels = {
        f"{factor}={level}": totals_of(pick(rows, **{factor: level}))
        for factor in FACTORS
        for level in sorted({row[factor] for row in rows})
    }
    outcomes = list(record)
    counts = {
        "points": len(all_points()),
        "seeds": len(seeds),
        "simulations": len(outcomes),
        "abandoned": sum(one.at_most is not None for one in outcomes),
        "cpu_s": round(sum(one.cpu_s for one in outcomes)),
        "simulated_s": round(sum(one.ended_s for one in outcomes)),
    }
    return {"counts": counts, "all": totals_of(rows), "by_level": levels, "points": rows}


def row_of(point: Point, record: Record, seeds: Sequence[int] = SEEDS) -> Row:
    arrivals_s = len(seeds) * point.arrivals_s
    default = held_at(point, record, DEFAULT, seeds)
    screened = {name: record.find(point.of_seed(seeds[0]).name, name) for name in _others(point)}
    row = _labels(point) | {"num_sent": sum(one.num_sent for one in default.outcomes), "num_seeds": len(seeds)}
    row |= default.row("default", arrivals_s)
    row |= _beside_best(point, record, default, seeds)
    row["contested"] = default.row("", 1.0)[""] < 100 * ENOUGH or any(
        one is not None and (one.at_most is not None or one.attainment < ENOUGH) for one in screened.values()
    )
    row["left_out"] = [name for name, outcome in screened.items() if outcome is None]
    return chosen([row], row)[0]


def _others(point: Point) -> Mapping[str, System]:
    return others(point.accelerators, has_best_effort=point.has_best_effort)


def _labels(point: Point) -> Row:
    labels = {name: getattr(point, name) for name in ("trace", "load", "objectives", "accelerators", "rate")}
    return {"point": point.name, **labels, "beside": "best-effort" if point.has_best_effort else "nothing"}


def _beside_best(point: Point, record: Record, default: Held, seeds: Sequence[int]) -> Row:
    systems = _others(point)
    ended: list[tuple[System, int]] = []
    for name, system in systems.items():
        outcome = record.find(point.of_seed(seeds[0]).name, name)
        if outcome is not None and outcome.at_most is None:
            ended.append((system, outcome.num_met))
    known = [held_at(point, record, system, seeds) for system in finalists(ended)]
    ranked = sorted((one for one in known if len(one.outcomes) == len(seeds)), key=lambda one: -one.num_met)
    if not ranked:
        return {}
    best = ranked[0]
    apart = interval([ours - theirs for ours, theirs in zip(default.percents, best.percents, strict=True)])
    row = best.row("best", len(seeds) * point.arrivals_s)
    row |= {"of": best.system, "knows_classes": systems[best.system].knows_classes}
    return row | _apart(apart, default, best)


def _apart(apart: Interval, default: Held, best: Held) -> Row:
    return {"ahead": apart.mean, "ahead_half": apart.half, "gain": _ratio(default.num_met, best.num_met)}


# --- totals


def totals_of(rows: Sequence[Row]) -> Row:
    """Return how many points there are, at how many each claim holds, and the lead where none holds 99 %."""
    compared = [row for row in rows if "ahead" in row]
    open_points = [row for row in compared if max(row["default"], row["best"]) < 100 * ENOUGH]
    totals = {
        "num_points": len(rows),
        "num_contested": sum(row["contested"] for row in rows),
        "num_held": sum(row["default"] >= 100 * ENOUGH and row["default_served"] for row in rows),
        "num_served": sum(row["default_served"] for row in rows),
        "num_behind": sum(row["ahead"] < -CLAIMED_POINTS for row in compared),
        "num_ahead": sum("ahead" not in row or row["ahead"] > CLAIMED_POINTS for row in rows),
        "num_open": len(open_points),
        "mean_ahead": mean(row["ahead"] for row in open_points) if open_points else None,
    }
    return chosen([totals], totals)[0]


def _ratio(ours: float, theirs: float) -> float | None:
    return 100 * (ours / theirs - 1) if theirs else None


def show(summary: Mapping[str, Any]) -> None:
    """Print the points, the furthest behind first, and the totals."""
    rows = sorted(summary["points"], key=lambda row: row.get("ahead", 100.0))
    print_table(rows, _COLUMNS, title="beside the best of the field")
    levels = [{"of": name, **totals} for name, totals in {"all": summary["all"], **summary["by_level"]}.items()]
    print_table(levels, {name: name for name in levels[0]}, title="totals")
    print(summary["counts"])
