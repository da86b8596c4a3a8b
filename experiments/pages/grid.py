"""Tables of docs/experiments/grid.md."""

from collections import Counter
from collections.abc import Sequence

from experiments.common import Row
from experiments.pages.record import bold, figures, table


def _compared() -> list[Row]:
    """Return the points at which others were simulated, the furthest behind first."""
    return sorted((row for row in figures("grid")["points"] if "ahead" in row), key=lambda row: row["ahead"])


def commits() -> str:
    """Count the points by the commit of the default's simulation."""
    numbers = Counter(row["commit"] for row in figures("grid")["points"])
    return table(["commit", "points"], ([f"`{commit}`", str(count)] for commit, count in numbers.items()))


def totals() -> str:
    """Return the counts over all points and over every level of a factor, and the goodput over the best other."""
    counted = ("num_points", "num_held", "num_behind", "num_ahead", "num_contested")
    rows = [
        [
            name,
            *(str(level[one]) for one in counted),
            _signed(level["mean_ahead"], " points"),
            _signed(level["mean_gain"]),
        ]
        for name, level in _levels()
    ]
    head = ["", "points", "default holds 99 %", "over 1 behind", "over 1 ahead", "none holds 99 %"]
    return table([*head, "attainment there", "goodput there"], rows)


def over_field() -> str:
    """Return the goodput over the best of fcfs and sarathi, likewise."""
    rows = [
        [
            name,
            str(level["num_field"]),
            str(level["num_field_ahead"]),
            _signed(level["mean_field_ahead"], " points"),
            bold(_signed(level["summed_field_gain"])),
            _signed(level["median_field_gain"]),
            _signed(level["least_field_gain"]),
        ]
        for name, level in _levels()
        if level["num_field"]
    ]
    head = ["", "points", "field ahead", "attainment", "goodput, all together", "median point", "least"]
    return table(head, rows)


def _levels() -> list[tuple[str, Row]]:
    all_figures = figures("grid")
    levels = [(name.replace("=", " "), level) for name, level in all_figures["by_level"].items()]
    return [("all", all_figures["all"]), *levels]


def _signed(value: float | None, unit: str = " %") -> str:
    return "-" if value is None else f"{value:+.1f}{unit}"


def compared() -> str:
    """Return every point at which others were simulated."""
    rows = [
        [
            row["point"],
            str(row["num_seeds"]),
            f"{row['default']:.1f} %",
            f"{row['best']:.1f} %",
            row["of"],
            bold(f"{row['ahead']:+.1f}") if row["ahead"] < -1 else f"{row['ahead']:+.1f}",
            *_field_cells(row),
        ]
        for row in _compared()
    ]
    head = ["point", "seeds", "default", "best other", "which", "points", "field", "which", "goodput over it"]
    return table(head, rows)


def _field_cells(row: Row) -> list[str]:
    if "field" not in row:
        return ["-", "-", "-"]
    return [f"{row['field']:.1f} %", row["field_of"], _signed(row["field_gain"])]


def lost() -> str:
    """Return at which points another holds more with the first seed, and by which requests."""
    rows = []
    for point in figures("grid_differences"):
        theirs = [one for one in point["requests"] if one["holds"] == "other"]
        late = sum(not _is_in_time(one["ttft"][0], one["ttft_slo"]) for one in theirs)
        num_ours = len(point["requests"]) - len(theirs)
        held = f"{point['num_met']}, {point['num_met_by_other']} of {point['num_sent']}"
        counts = (str(one) for one in (num_ours, len(theirs), late, point["num_moved"]))
        rows.append([point["point"], point["of"], held, *counts])
    head = ["point", "other", "held: default, other", "the default alone", "the other alone"]
    return table([*head, "of these first token late", "moved"], rows)


def _is_in_time(took_s: float | None, objective_s: float | None) -> bool:
    return objective_s is None or (took_s is not None and took_s <= objective_s)


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


TABLES = {
    "totals": totals,
    "over_field": over_field,
    "compared": compared,
    "lost": lost,
    "changed": changed,
    "commits": commits,
}
