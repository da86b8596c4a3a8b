"""Tables of docs/experiments/grid.md."""

from collections.abc import Callable, Sequence
from functools import cache

from experiments.common import Row
from experiments.grid.record import PATH, Record
from experiments.grid.systems import FIELD, UNION
from experiments.pages.record import bold, bullets, digits, figures, seconds, states_of, table
from experiments.steady import LEAST_S
from experiments.validity.rows import is_stale, states

_SHOWN = 12
_NONE = "none over 98 %"


@cache
def rows() -> Sequence[Row]:
    """Return a row for every simulation of the record: what it is of, and the digest of what decided."""
    return [
        {
            "policy": one.policy,
            "system": one.kind,
            "point": one.point.partition("/seed")[0],
            "run": one.system,
            "sent_s": 0.0 if one.at_most is not None else LEAST_S,  # an abandoned one is no rate
            "code": one.code,
        }
        for one in Record(PATH)
    ]


def record() -> str:
    return bullets(states_of(rows(), states("grid", rows())))


def progress() -> str:
    counts, level = figures("grid")["counts"], figures("grid")["all"]
    done, hours = level["num_points"], counts["simulated_s"] / 3600
    return bullets(
        [
            f"**{done} of {counts['points']} points are done**, ten minutes and {counts['seeds']} seeds each; "
            f"{level['num_contested']} of them contest something (some system is below 99 %)",
            f"{counts['simulations']} simulations, {counts['abandoned']} of them abandoned: {hours:.0f} simulated "
            f"hours in {counts['cpu_s'] / 60:.0f} minutes of one processor",
            f"the field: {', '.join(f'`{one.policy}`' for one in FIELD)}",
        ]
    )


def verdict() -> str:
    """Return at how many points each claim holds, the losing ones first."""
    level, points = figures("grid")["all"], figures("grid")["points"]
    behind = [row for row in points if row.get("ahead", 0.0) < -1.0]
    sure = [row for row in behind if row["ahead"] + (row["ahead_half"] or 0.0) < 0.0]
    lost = f"{len(behind)} of {level['num_points']} ({len(sure)} of them with the whole interval below 0)"
    open_points = level["num_open"]
    said = [
        f"more than a point behind the best of the field: **{lost}**",
        f"where none holds 99 %: {open_points} points; goodput +15 % or more at **{level['num_gained']} of them**, "
        f"{_signed(level['median_gain'])} at the median point, {_signed(level['summed_gain'])} all together, "
        f"{_signed(level['least_gain'])} at the worst. At {level['num_narrow']} of the {open_points} the best of the "
        f"field holds 87 % or more, so that there is no such gain to be had",
        f"requests missed there: {_signed(level['summed_misses'])} all together",
        f"best-effort tokens there: {_signed(level['summed_be_gain'])} all together (-: no such point has any)",
        f"rates that the default serves (completions at least 0.95 of arrivals): {level['num_served']} of "
        f"{level['num_points']}",
    ]
    return bullets(said)


def totals() -> str:
    counted = ("num_points", "num_contested", "num_held", "num_served", "num_behind", "num_ahead", "num_open")
    levels = [("all", figures("grid")["all"])]
    levels += [(name.replace("=", " "), level) for name, level in figures("grid")["by_level"].items()]
    lines = [
        [name, *(str(level[one]) for one in counted), _signed(level["mean_ahead"], ""), _signed(level["summed_gain"])]
        for name, level in levels
    ]
    head = ["", "points", "contested", "default holds 99 %", "serves", "over 1 behind", "over 1 ahead", "none holds"]
    return table([*head, "points ahead there", "goodput there"], lines)


def beside() -> str:
    points = {row["point"]: row for row in figures("grid")["points"]}
    loaded = {f"{name.removesuffix('/be')}/alone": row for name, row in points.items() if name.endswith("/be")}
    pairs = [(points[name], row) for name, row in loaded.items() if name in points]
    stale = _stale_points()
    of_level: dict[str, list[tuple[Row, Row]]] = {"all": pairs}
    if any(loaded["point"] in stale for _, loaded in pairs):
        for name, is_stale_one in (("of today's decision code", False), ("of an older one", True)):
            of_level[name] = [pair for pair in pairs if (pair[1]["point"] in stale) is is_stale_one]
    for level in ("trace", "load"):
        for pair in sorted(pairs, key=lambda pair: pair[0][level]):
            of_level.setdefault(f"{level} {pair[0][level]}", []).append(pair)
    head = ["", "pairs", "over 1 point lost", "points lost, mean", "most", "at", "BE tokens/s of an accelerator"]
    return table(head, [_beside_cells(name, found) for name, found in of_level.items() if found])


def _stale_points() -> set[str]:
    found = rows()
    return {
        str(row["point"])
        for row, state in zip(found, states("grid", found), strict=True)
        if row["policy"] == UNION and is_stale(state)
    }


def _beside_cells(name: str, pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    lost = [alone["default"] - loaded["default"] for alone, loaded in pairs]
    most, at = max(zip(lost, (loaded["point"] for _, loaded in pairs), strict=True))
    tokens_per_s = [loaded["default_be"] / loaded["accelerators"] for _, loaded in pairs]
    return [
        name,
        str(len(pairs)),
        str(sum(points > 1.0 for points in lost)),
        f"{sum(lost) / len(pairs):.1f}",
        f"{most:.1f}",
        at.removesuffix("/be"),
        _number(sum(tokens_per_s) / len(pairs)),
    ]


def floor() -> str:
    lines = [
        [
            row["point"],
            *(f"{row[name]:.1f} %" for name in ("alone", "beside", "without_floor", "best")),
            f"{row['ahead_without_floor']:+.1f}",
            *(_number(row[name]) for name in ("beside_be", "without_floor_be", "best_be")),
        ]
        for row in figures("grid_floor")
    ]
    head = ["", "chat alone", "beside documents", "floor of 0", "best of the field", "ahead then"]
    return table([*head, "BE tokens/s", "floor of 0", "of the field"], lines)


def compared() -> str:
    points = sorted(figures("grid")["points"], key=lambda row: row.get("ahead", 100.0))[:_SHOWN]
    head = ["point", "default", "best", "which", "ahead", "goodput", "BE tokens/s", "gap"]
    return table(head, map(_cells, points))


def _cells(row: Row) -> list[str]:
    default = f"{row['default']:.1f} ± {row['default_half']:.1f} %"
    if "ahead" not in row:
        return [
            row["point"], default, "-", _NONE, "-", "-", _number(row["default_be"]), seconds(row["default_gap"]),
        ]  # fmt: skip
    ahead = f"{row['ahead']:+.1f} ± {row['ahead_half']:.1f}"
    return [
        row["point"],
        default,
        f"{row['best']:.1f} %",
        f"`{row['of'].removesuffix(' colocated')}`",
        bold(ahead) if row["ahead"] < -1 else ahead,
        _signed(row["gain"]),
        _pair(row, "be", _number),
        _pair(row, "gap", seconds),
    ]


def _pair(row: Row, name: str, shown: Callable[[float], str]) -> str:
    ours, theirs = shown(row[f"default_{name}"]), shown(row[f"best_{name}"])
    if ours == theirs == "-":
        return ours
    unit = ours.rpartition(" ")[2]
    return f"{ours.removesuffix(f' {unit}') if theirs.endswith(f' {unit}') else ours}, {theirs}"


def _number(value: float | None) -> str:
    return "-" if value is None else digits(value, 3)


def _signed(value: float | None, unit: str = " %") -> str:
    return "-" if value is None else f"{value:+.1f}{unit}"


TABLES = {
    "record": record,
    "progress": progress,
    "verdict": verdict,
    "totals": totals,
    "beside": beside,
    "floor": floor,
    "compared": compared,
}
