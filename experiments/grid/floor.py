"""Compares the default with itself at a `router.best_effort_floor` of 0: what documents' floor costs chat.

    python -m experiments.grid.floor [POINT ...]

Every seed of each point is simulated to its end with a floor of 0; all else is of the grid's record. Without names of
points, those with documents beside where the best of the field is more than a point ahead.
"""

from dataclasses import replace

from rich.progress import track

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.intervals import interval
from experiments.common import Row, print_table, write_record
from experiments.grid.points import SEEDS, Point, all_points
from experiments.grid.record import PATH, Record
from experiments.grid.search import is_searched, simulate
from experiments.grid.summary import CLAIMED_POINTS, Held, held_at, row_of
from experiments.grid.systems import DEFAULT

_WITHOUT = DEFAULT._replace(best_effort_floor=0.0)
_COLUMNS = {
    "point": "point",
    "alone": "chat alone %",
    "beside": "beside documents %",
    "without_floor": "floor of 0 %",
    "best": "best of the field %",
    "ahead_without_floor": "points ahead, floor of 0",
    "beside_be": "BE tokens/s",
    "without_floor_be": "floor of 0",
    "best_be": "of the field",
}


def main() -> None:
    """Simulate, print and record."""
    parser = parser_of(__doc__)
    parser.add_argument("points", nargs="*", help="by their names, with documents beside: sharegpt/0.78/tight/4/be")
    wanted, record = parser.parse_args().points, Record(PATH)
    if wanted:
        points = [one for one in all_points() if one.name in wanted]
    else:
        points = [one for one in all_points() if one.has_best_effort and _is_lost(one, record)]
    rows = [compared(one, record) for one in track(points, "points", transient=True)]
    print_table(rows, _COLUMNS)
    write_record("grid_floor", rows)


def compared(point: Point, record: Record) -> Row:
    """Return what chat attains alone, beside documents with the floor and without, and by the best of the field."""
    outcomes = [simulate(point.of_seed(seed), _WITHOUT, 0) for seed in SEEDS]
    without = Held(_WITHOUT.name(point.accelerators), outcomes)
    alone = held_at(replace(point, has_best_effort=False), record, DEFAULT, SEEDS)
    known = row_of(point, record)
    leads = [mine - known["best"] for mine in without.percents]
    return {
        "point": point.name,
        "alone": interval(alone.percents).mean,
        "beside": known["default"],
        "beside_be": known["default_be"],
        **without.row("without_floor", point.minutes * 60.0 * len(SEEDS)),
        "best": known["best"],
        "best_be": known["best_be"],
        "of": known["of"],
        "ahead_without_floor": interval(leads).mean,
    }


def _is_lost(point: Point, record: Record) -> bool:
    return is_searched(point, record) and row_of(point, record).get("ahead", 0.0) < -CLAIMED_POINTS


if __name__ == "__main__":
    main()
