"""Tables of docs/experiments/grid.md."""

from collections import Counter
from collections.abc import Sequence

from experiments.common import Row
from experiments.pages.record import bold, figures, table


def _compared() -> list[Row]:
    """Return the points at which others were simulated, the furthest behind first."""
    return sorted((row for row in figures("grid")["points"] if "ahead" in row), key=lambda row: row["ahead"])


def commits() -> str:
    """Return how many points are of which commit, by the default's simulation."""
    numbers = Counter(row["commit"] for row in figures("grid")["points"])
    return table(["commit", "points"], ([f"`{commit}`", str(count)] for commit, count in numbers.items()))


def totals() -> str:
    """Return the counts over all points and over every level of a factor."""
    all_figures = figures("grid")
    levels = {"all": all_figures["all"], **all_figures["by_level"]}
    names = ("num_points", "num_held", "num_behind", "num_ahead", "num_contested")
    rows = [
        [name.replace("=", " "), *(str(level[one]) for one in names), _signed(level["mean_gain"])]
        for name, level in levels.items()
    ]
    head = ["", "points", "default holds 99 %", "over 1 behind", "over 1 ahead", "none holds 99 %", "goodput there"]
    return table(head, rows)


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f} %"


def compared() -> str:
    """Return every point at which others were simulated."""
    rows = [
        [
            row["point"],
            f"{row['default']:.1f} %",
            f"{row['best']:.1f} %",
            row["of"],
            bold(f"{row['ahead']:+.1f}") if row["ahead"] < -1 else f"{row['ahead']:+.1f}",
            "-" if row["baseline"] is None else f"{row['baseline']:.1f} %",
        ]
        for row in _compared()
    ]
    return table(["point", "default", "best other", "which", "points", "fcfs, sarathi"], rows)


def changed() -> str:
    """Return what the default held before its rules were mended, and after."""
    rows = sorted(figures("grid")["changed"], key=lambda row: row["first"] - row["last"])
    cells = [
        [row["point"], f"{row['first']:.1f} %", f"{row['last']:.1f} %", _pair(row["first_be"], row["last_be"])]
        for row in rows
    ]
    return table(["point", "before", "now", "best-effort tokens/s"], [*cells, _means(rows)])


def _pair(before: float | None, now: float | None) -> str:
    return "-" if before is None or now is None else f"{before:.0f}, {now:.0f}"


def _means(rows: Sequence[Row]) -> list[str]:
    count = max(len(rows), 1)
    before, now = (sum(row[name] for row in rows) / count for name in ("first", "last"))
    return ["mean", f"{before:.1f} %", f"{now:.1f} %", "-"]


TABLES = {"commits": commits, "totals": totals, "compared": compared, "changed": changed}
