"""The summary of the grid, made of its record alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from experiments.common import Row, chosen, pick, print_table
from experiments.grid.points import SEEDS, Point, all_points
from experiments.grid.record import Outcome, Record
from experiments.grid.search import ENOUGH, is_repeated, is_searched
from experiments.grid.systems import DEFAULT, UNION, others

CLAIMED_POINTS = 1.0  # of attainment: no further behind the best of the others
CLAIMED_GAIN = 9.0  # % of goodput, in the mean of the points where none holds 99 %
_COLUMNS: Mapping[str, str] = {
    "point": "point",
    "rate": "requests/s",
    "default": "default %",
    "best": "best of others %",
    "of": "which",
    "ahead": "points ahead",
    "gain": "goodput %",
    "field": "fcfs, sarathi %",
    "field_gain": "goodput over it %",
    "num_seeds": "seeds",
    "default_be": "BE tokens/s",
    "best_be": "its BE",
}


class Held(NamedTuple):
    """The requests that one system held at a point, over all its seeds."""

    system: str
    num_sent: int
    num_met: int
    best_effort_tokens_per_s: float | None  # the mean

    @property
    def percent(self) -> float:
        """Return the attainment."""
        return 100 * self.num_met / self.num_sent

    def gain_over(self, other: "Held") -> float | None:
        """Return by how much per cent its goodput is more; None: the other held nothing."""
        return _ratio(self.num_met, other.num_met)


def held_at(point: Point, record: Record, *, seeds: Sequence[int]) -> dict[str, Held]:
    """Return, by its name, each system that was simulated to its end with all these seeds."""
    names = [DEFAULT.name(point.accelerators), *others(point.accelerators)]
    held = {}
    for name in names:
        found = [record.find(replace(point, seed=seed).name, name) for seed in seeds]
        ended = [one for one in found if one is not None and one.at_most is None]
        if len(ended) == len(seeds):
            held[name] = _together(name, ended)
    return held


def _together(name: str, outcomes: Sequence[Outcome]) -> Held:
    beside = [one.best_effort_tokens_per_s for one in outcomes if one.best_effort_tokens_per_s is not None]
    mean = sum(beside) / len(beside) if beside else None
    return Held(name, sum(one.num_sent for one in outcomes), sum(one.num_met for one in outcomes), mean)


def summary_of(record: Record) -> dict[str, Any]:
    """Return the points, totals over all and over every level of a factor, and the number of simulations."""
    points = [point for point in all_points() if is_searched(point, record)]
    rows = [row_of(point, record) for point in points]
    levels = {
        f"{factor}={level}": totals_of(pick(rows, **{factor: level}))
        for factor in ("trace", "load", "objectives", "accelerators", "beside")
        for level in sorted({row[factor] for row in rows})
    }
    outcomes = list(record)
    num_abandoned = sum(one.at_most is not None for one in outcomes)
    counts = {"points": len(all_points()), "simulations": len(outcomes), "abandoned": num_abandoned}
    changed = _changed(points, record)
    return {"counts": counts, "all": totals_of(rows), "by_level": levels, "changed": changed, "points": rows}


def points_apart(record: Record) -> list[Point]:
    """Return the points at which the first seed says that the default or another is ahead by more than is claimed.

    Those come first at which another is, the furthest behind before the others.
    """
    rows = {
        point: row["ahead"]
        for point in all_points()
        if is_searched(point, record) and "ahead" in (row := row_of(point, record, seeds=SEEDS[:1]))
    }
    return sorted((point for point, ahead in rows.items() if abs(ahead) > CLAIMED_POINTS), key=rows.__getitem__)


def _changed(points: Sequence[Point], record: Record) -> list[Row]:
    """Return the default at its first commit and at its last, where it has been simulated at two and missed some."""
    rows: list[Row] = []
    for point in points:
        name = DEFAULT.name(point.accelerators)
        first, last = record.first(point.name, name), record.find(point.name, name)
        if last is None or first.commit == last.commit or min(first.attainment, last.attainment) >= ENOUGH:
            continue
        row = {"first": 100 * first.attainment, "last": 100 * last.attainment}
        beside = {"first_be": first.best_effort_tokens_per_s, "last_be": last.best_effort_tokens_per_s}
        row = _labels(point) | row | beside | {"first_commit": first.commit, "last_commit": last.commit}
        rows += chosen([row], row)
    return rows


def row_of(point: Point, record: Record, *, seeds: Sequence[int] = ()) -> Row:
    """Return the comparison at a point. `seeds`: none are all, if the record has them, or else the first."""
    seeds = seeds or (SEEDS if is_repeated(point, record) else SEEDS[:1])
    held = held_at(point, record, seeds=seeds)
    default = held.pop(DEFAULT.name(point.accelerators))
    arrivals_s = len(seeds) * point.arrivals_s
    latest = record.find(point.name, default.system)
    row = _labels(point) | {
        "num_seeds": len(seeds),
        "num_sent": default.num_sent,
        "default": default.percent,
        "default_goodput": default.num_met / arrivals_s,
        "default_be": default.best_effort_tokens_per_s,
        "commit": latest.commit if latest is not None else "",
    }
    if default.percent >= 100 * ENOUGH and len(seeds) == 1:
        row["others"] = "not needed"
    else:
        row |= _beside_best(default, list(held.values()), arrivals_s)
        row["left_out"] = [name for name in others(point.accelerators) if record.find(point.name, name) is None]
    return chosen([row], row)[0]


def _labels(point: Point) -> Row:
    labels = {name: getattr(point, name) for name in ("trace", "load", "objectives", "accelerators", "rate")}
    return {"point": point.name, **labels, "beside": "best-effort" if point.has_best_effort else "nothing"}


def _beside_best(default: Held, rivals: Sequence[Held], arrivals_s: float) -> Row:
    """Return the best of the others beside the default, and the best of the field where none holds 99 %."""
    best = _best(rivals)
    row = {
        "best": best.percent,
        "of": best.system,
        "ahead": default.percent - best.percent,
        "gain": default.gain_over(best),
        "best_goodput": best.num_met / arrivals_s,
        "best_be": best.best_effort_tokens_per_s,
    }
    baselines = [one for one in rivals if not one.system.startswith(UNION)]
    if max(default.percent, best.percent) >= 100 * ENOUGH or not baselines:
        return row
    field = _best(baselines)
    return row | {
        "field": field.percent,
        "field_of": field.system,
        "field_gain": default.gain_over(field),
        "field_goodput": field.num_met / arrivals_s,
        "field_be": field.best_effort_tokens_per_s,
    }


def _best(held: Sequence[Held]) -> Held:
    return max(held, key=lambda one: (one.num_met, one.best_effort_tokens_per_s or 0.0))


# --- totals


def totals_of(rows: Sequence[Row]) -> Row:
    """Return how many points there are, at how many the claim holds, and the gain where none holds 99 %."""
    compared = [row for row in rows if "ahead" in row]
    contested = [row for row in compared if max(row["default"], row["best"]) < 100 * ENOUGH]
    beside_field = [row for row in contested if "field" in row]
    gains = [row["field_gain"] for row in beside_field if row["field_gain"] is not None]
    totals = {
        "num_points": len(rows),
        "num_held": sum(row["default"] >= 100 * ENOUGH for row in rows),
        "num_behind": sum(row["ahead"] < -CLAIMED_POINTS for row in compared),
        "num_ahead": sum(row["ahead"] > CLAIMED_POINTS for row in compared),
        "num_contested": len(contested),
        "mean_ahead": _mean(contested, lambda row: row["ahead"]),
        "mean_gain": _mean_gain(contested, "gain"),
        "summed_gain": _summed_gain(contested, "best_goodput"),
        "num_field": len(beside_field),
        "num_field_ahead": sum(row["field"] > row["default"] for row in beside_field),
        "mean_field_ahead": _mean(beside_field, lambda row: row["default"] - row["field"]),
        "mean_field_gain": _mean_gain(beside_field, "field_gain"),
        "median_field_gain": median(gains) if gains else None,
        "least_field_gain": min(gains, default=None),
        "summed_field_gain": _summed_gain(beside_field, "field_goodput"),
    }
    return chosen([totals], totals)[0]


def _mean(rows: Sequence[Row], value: Callable[[Row], float]) -> float | None:
    return sum(map(value, rows)) / len(rows) if rows else None


def _mean_gain(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean gain; a point where the other held nothing has none, and is left out."""
    return _mean([row for row in rows if row[name] is not None], lambda row: row[name])


def _summed_gain(rows: Sequence[Row], other: str) -> float | None:
    """Return the gain of all goodput together, to which points where hardly anything is held add little."""
    return _ratio(sum(row["default_goodput"] for row in rows), sum(row[other] for row in rows))


def _ratio(ours: float, theirs: float) -> float | None:
    """Return by how much per cent ours is more."""
    return 100 * (ours / theirs - 1) if theirs else None


def show(summary: Mapping[str, Any]) -> None:
    """Print the points at which others were simulated, the furthest behind first, and the totals."""
    compared = sorted((row for row in summary["points"] if "ahead" in row), key=lambda row: row["ahead"])
    print_table(compared, _COLUMNS, title="beside the best of the others")
    levels = [{"of": name, **totals} for name, totals in {"all": summary["all"], **summary["by_level"]}.items()]
    print_table(levels, {name: name for name in levels[0]}, title="totals")
    print(summary["counts"])
