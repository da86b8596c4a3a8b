"""Tables of docs/experiments/grid.md."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from statistics import mean, median

from experiments.common import Row
from experiments.grid.points import LOADS
from experiments.grid.record import PATH, Record
from experiments.grid.search import ENOUGH
from experiments.grid.systems import FIELD
from experiments.pages.record import bold, bullets, count, digits, figures, seconds, states_of, table
from experiments.steady import LEAST_S
from experiments.validity.rows import states

_SHOWN = 6
_NONE = "none over 98 %"
_LEVEL = 90.0  # % of the requests that hold
LONG_GAP_S = 10


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
    """Return how much load the default holds by the field, and what it pays: the losing points first."""
    level, points = figures("grid")["all"], figures("grid")["points"]
    behind = [row for row in points if row.get("ahead", 0.0) < -1.0]
    sure = [row for row in behind if row["ahead"] + (row["ahead_half"] or 0.0) < 0.0]
    lost = f"{len(behind)} of {level['num_points']} ({len(sure)} of them with the whole interval below 0)"
    missed = [row for row in points if "ahead" in row and max(row["default"], row["best"]) < 100 * ENOUGH]
    fluidities = [row["default_fluidity"] - row["best_fluidity"] for row in missed]
    below, above = (sum(sign * apart > 0.01 for apart in fluidities) for sign in (-1, 1))
    gaps, field_gaps = (sum(row[f"{of}_gap"] > LONG_GAP_S for row in missed) for of in ("default", "best"))
    said = [
        f"more than a point behind the best of the field: **{lost}**",
        *_capacity(points),
        f"where none holds 99 % ({len(missed)} points) fluidity is over a point lower at **{below}** and higher at "
        f"{above}; the longest gap is over {LONG_GAP_S} s at **{gaps}**, of the best of the field at {field_gaps}",
        f"documents there, summed, without ShareGPT: {_documents(missed, is_sharegpt=False)}; ShareGPT: "
        f"{_documents(missed, is_sharegpt=True)}, where the best is often `fcfs_classed`, which starves them",
        f"rates that the default serves (completions at least 0.95 of arrivals): {level['num_served']} of "
        f"{level['num_points']}",
    ]
    return bullets(said)


def _capacity(points: Sequence[Row]) -> list[str]:
    """Return the load at which 90 % hold, by that of the best of the field; nothing without whole workloads."""
    workloads: dict[str, list[Row]] = {}
    for row in points:
        workloads.setdefault(row["point"].replace(f"/{row['load']}/", "/"), []).append(row)
    whole = [rows for rows in workloads.values() if len(rows) == len(LOADS)]
    if not whole:
        return []
    ours, theirs = ([_load_held(rows, name) for rows in whole] for name in ("default", "best"))
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    censored = ours.count(max(LOADS))
    return [
        f"the load at which 90 % hold, by that of the best of the field: **{median(ratios):.2f} times in the median of "
        f"{len(ratios)} workloads**, mean {mean(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f} (straight lines "
        f"between loads; at {censored} the default still holds 90 % at 150 %; an abandoned field counts as 98 %)"
    ]


def _load_held(rows: Sequence[Row], name: str) -> float:
    curve = sorted((float(row["load"]), float(row.get(name, 98.0))) for row in rows)
    for (load, held), (next_load, next_held) in pairwise(curve):
        if held < _LEVEL or next_held < _LEVEL:
            return load + (next_load - load) * max(held - _LEVEL, 0.0) / max(held - next_held, 1e-9)
    return curve[-1][0]


def _documents(rows: Sequence[Row], *, is_sharegpt: bool) -> str:
    of = [row for row in rows if row["default_be"] and (row["trace"] == "sharegpt") is is_sharegpt]
    ours, theirs = (sum(row[f"{name}_be"] for row in of) for name in ("default", "best"))
    return f"{count(ours)} tokens/s for {count(theirs)} ({_signed(100 * (ours / theirs - 1))})" if of else "-"


def totals() -> str:
    counted = ("num_points", "num_contested", "num_held", "num_served", "num_behind", "num_ahead", "num_open")
    levels = [("all", figures("grid")["all"])]
    levels += [(name.replace("=", " "), level) for name, level in figures("grid")["by_level"].items()]
    lines = [[name, *(str(level[one]) for one in counted), _signed(level["mean_ahead"], "")] for name, level in levels]
    head = ["", "points", "contested", "default holds 99 %", "serves", "over 1 behind", "over 1 ahead", "none holds"]
    return table([*head, "points ahead there"], lines)


def beside() -> str:
    points = {row["point"]: row for row in figures("grid")["points"]}
    loaded = {f"{name.removesuffix('/be')}/alone": row for name, row in points.items() if name.endswith("/be")}
    pairs = [(points[name], row) for name, row in loaded.items() if name in points]
    of_level: dict[str, list[tuple[Row, Row]]] = {"all": pairs}
    for pair in sorted(pairs, key=lambda pair: pair[0]["trace"]):
        of_level.setdefault(f"trace {pair[0]['trace']}", []).append(pair)
    head = ["", "pairs", "over 1 point lost", "points lost, mean", "most", "at", "BE tokens/s of an accelerator"]
    return table(head, [_beside_cells(name, found) for name, found in of_level.items() if found])


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
