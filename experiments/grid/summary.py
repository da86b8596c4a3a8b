"""The summary of the grid, made of its record alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.common import Row, chosen, pick, print_table
from experiments.grid.points import Point, all_points
from experiments.grid.record import Outcome, Record
from experiments.grid.search import ENOUGH, is_searched
from experiments.grid.systems import DEFAULT, UNION, families

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
    "baseline": "fcfs, sarathi %",
    "default_be": "BE tokens/s",
    "best_be": "its BE",
}


def summary_of(record: Record) -> dict[str, Any]:
    """Return the points, totals over all and over every level of a factor, and the number of simulations."""
    outcomes: dict[str, list[Outcome]] = {}
    for outcome in record:
        outcomes.setdefault(outcome.point, []).append(outcome)
    rows = [_row_of(point, outcomes[point.name]) for point in all_points() if is_searched(point, record)]
    levels = {
        f"{factor}={level}": totals_of(pick(rows, **{factor: level}))
        for factor in ("trace", "load", "objectives", "accelerators", "beside")
        for level in dict.fromkeys(row[factor] for row in rows)
    }
    num_simulations = sum(map(len, outcomes.values()))
    num_abandoned = sum(one.at_most is not None for ones in outcomes.values() for one in ones)
    counts = {"points": len(all_points()), "simulations": num_simulations, "abandoned": num_abandoned}
    changed = _changed([point for point in all_points() if point.name in {row["point"] for row in rows}], record)
    return {"counts": counts, "all": totals_of(rows), "by_level": levels, "changed": changed, "points": rows}


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


def _row_of(point: Point, outcomes: Iterable[Outcome]) -> Row:
    """Return the comparison at a point."""
    by_system = {one.system: one for one in outcomes}
    default = by_system.pop(DEFAULT.name(point.accelerators))
    row = _labels(point) | {
        "num_sent": default.num_sent,
        "default": 100 * default.attainment,
        "default_goodput": default.num_met / point.arrivals_s,
        "default_be": default.best_effort_tokens_per_s,
        "commit": default.commit,
    }
    if default.attainment >= ENOUGH:
        row["others"] = "not needed"
    else:
        row |= _best_of(point, default, [one for one in by_system.values() if one.at_most is None])
        row["left_out"] = _left_out(point, by_system)
    return chosen([row], row)[0]


def _labels(point: Point) -> Row:
    labels = {name: getattr(point, name) for name in ("trace", "load", "objectives", "accelerators", "rate")}
    return {"point": point.name, **labels, "beside": "best-effort" if point.has_best_effort else "nothing"}


def _best_of(point: Point, default: Outcome, others: Sequence[Outcome]) -> Row:
    best = max(others, key=lambda one: (one.num_met, one.best_effort_tokens_per_s or 0.0))
    baselines = [one for one in others if not one.system.startswith(UNION)]
    return {
        "best": 100 * best.attainment,
        "of": best.system,
        "ahead": 100 * (default.attainment - best.attainment),
        "gain": 100 * (default.num_met / best.num_met - 1) if best.num_met else None,
        "best_goodput": best.num_met / point.arrivals_s,
        "best_be": best.best_effort_tokens_per_s,
        "baseline": max((100 * one.attainment for one in baselines), default=None),
    }


def _left_out(point: Point, by_system: Mapping[str, Outcome]) -> list[str]:
    """Return the systems that the climb did not come to."""
    names = [one.name(point.accelerators) for systems, _ in families(point.accelerators) for one in systems]
    return [name for name in names if name not in by_system]


def totals_of(rows: Sequence[Row]) -> Row:
    """Return how many points there are, at how many the claim holds, and the gain where none holds 99 %."""
    compared = [row for row in rows if "ahead" in row]
    contested = [row for row in compared if max(row["default"], row["best"]) < 100 * ENOUGH]
    is_known = all(row["baseline"] is not None for row in contested)  # else it would be those where a baseline is best
    beside = contested if is_known else []
    totals = {
        "num_points": len(rows),
        "num_held": len(rows) - len(compared),  # by the default, so that nothing else need be known
        "num_behind": sum(row["ahead"] < -CLAIMED_POINTS for row in compared),
        "num_ahead": sum(row["ahead"] > CLAIMED_POINTS for row in compared),
        "num_contested": len(contested),
        "mean_ahead": _mean(contested, lambda row: row["ahead"]),
        "mean_gain": _mean([row for row in contested if row["gain"] is not None], lambda row: row["gain"]),
        "summed_gain": _summed_gain(contested),
        "baselines_ahead": _mean(beside, lambda row: row["default"] - row["baseline"]),
        "baselines_gain": _ratio(sum(row["default"] for row in beside), sum(row["baseline"] for row in beside)),
    }
    return chosen([totals], totals)[0]


def _mean(rows: Sequence[Row], value: Callable[[Row], float]) -> float | None:
    return sum(map(value, rows)) / len(rows) if rows else None


def _summed_gain(rows: Sequence[Row]) -> float | None:
    """Return the gain of all goodput together, to which points where hardly anything is held add little."""
    return _ratio(sum(row["default_goodput"] for row in rows), sum(row["best_goodput"] for row in rows))


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
