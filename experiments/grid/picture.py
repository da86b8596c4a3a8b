"""The pictures of the grid: a cell for every point, coloured by the lead of the default."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from experiments.common import Row
from experiments.grid.points import ACCELERATORS, LOADS, OBJECTIVES, TRACES, Point
from lab.sim.report.svg import element, number, text

_CELL, _GAP = 24, 10  # of a cell; between panels
_LEFT, _TOP = 130, 62
_STYLE = """
text { font: 10px sans-serif; fill: #333 } .title { font-weight: bold } .cell { stroke: #ddd }
.value { font-size: 8px; text-anchor: middle } .end { text-anchor: end } .middle { text-anchor: middle }
"""
_EMPTY, _HELD, _NONE = "#f5f5f5", "#cfe8c6", "#fff"
_HELD_PERCENT = 99
_TOO_LONG = 999.5  # per cent: shown as so many times


class _Lead(NamedTuple):
    """The value of each point that a picture shows."""

    title: str
    unit: str
    value: Callable[[Row], float | None]  # None: there is nothing to compare
    words: Callable[[Row], str]
    most: float  # the deepest colours


_OVER_BEST = _Lead(
    "Attainment of aligned_slo elastic less that of the best of the field, in points",
    "points",
    lambda row: row.get("ahead"),
    lambda row: f"{row['of']} {row['best']:.1f} %",
    most=20.0,
)
_OVER_FIELD = _Lead(
    "Goodput of aligned_slo elastic over the best of the field, in %, where none holds 99 %",
    "%",
    lambda row: row.get("gain") if max(row["default"], row.get("best", 0.0)) < _HELD_PERCENT else None,
    lambda row: f"{row['of']} {row['best']:.1f} %",
    most=100.0,
)


def draw(rows: Sequence[Row], lead: _Lead = _OVER_BEST) -> str:
    """Draw all points; traces and objectives downwards, machines, best-effort work and rates to the right."""
    by_point = {row["point"]: row for row in rows}
    panels = [(count, beside) for count in ACCELERATORS for beside in (False, True)]
    width = _LEFT + len(panels) * (len(LOADS) * _CELL + _GAP)
    height = _TOP + len(TRACES) * (len(OBJECTIVES) * _CELL + _GAP) + 30
    parts = [element("style", _STYLE), text(lead.title, x=8, y=16, class_="title")]
    parts += [*_headings(panels), *_row_names(), *_legend(height - 14, lead)]
    for column, (accelerators, beside) in enumerate(panels):
        for line, trace in enumerate(TRACES):
            for x, load in enumerate(LOADS):
                for y, objectives in enumerate(OBJECTIVES):
                    point = Point(trace, load, objectives, accelerators, beside)
                    parts.append(_cell(*_place(column, x, line, y), point, by_point.get(point.name), lead))
    box = f"0 0 {number(width)} {number(height)}"
    return element("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=box, role="img", aria_label=lead.title)


def draw_field(rows: Sequence[Row]) -> str:
    return draw(rows, _OVER_FIELD)


PICTURES: Mapping[str, Callable[[Sequence[Row]], str]] = {"grid.svg": draw, "grid_field.svg": draw_field}


def _place(column: int, x: int, line: int, y: int) -> tuple[float, float]:
    left = _LEFT + column * (len(LOADS) * _CELL + _GAP) + x * _CELL
    return left, _TOP + line * (len(OBJECTIVES) * _CELL + _GAP) + y * _CELL


def _cell(x: float, y: float, point: Point, row: Row | None, lead: _Lead) -> str:
    label, colour, words = "", _EMPTY, "not simulated"
    if row is not None:
        ahead = lead.value(row)
        label, colour, words = ("✓", _HELD, "") if row["default"] >= _HELD_PERCENT else ("·", _NONE, "")
        if ahead is not None:
            label, colour, words = _number(ahead), _colour(ahead / lead.most), f"; {lead.words(row)}"
        words = f"{row['default']:.1f} %{words}"
    box = element("rect", x=x, y=y, width=_CELL, height=_CELL, fill=colour, class_="cell")
    value = text(label, x=x + _CELL / 2, y=y + _CELL / 2 + 3, class_="value")
    return element("g", element("title", escape(f"{point.name}: {words}")), box, value)


def _number(ahead: float) -> str:
    if ahead >= _TOO_LONG:
        return f"{1 + ahead / 100:.0f}x"
    return f"{ahead:+.0f}" if abs(ahead) >= 0.5 else "0"


def _colour(ahead: float) -> str:
    depth = min(abs(ahead), 1.0)
    pale, faint = round(255 - 175 * depth), round(255 - 115 * depth)
    return f"rgb({pale},{faint},255)" if ahead >= 0 else f"rgb(255,{faint},{pale})"


def _headings(panels: Sequence[tuple[int, bool]]) -> Iterator[str]:
    for column, (accelerators, beside) in enumerate(panels):
        x, _ = _place(column, 0, 0, 0)
        words = f"{accelerators} accelerators{', best-effort' if beside else ''}"
        yield text(words, x=x, y=_TOP - 22)
        for place, load in enumerate(LOADS):
            yield text(f"{load:.0%}", x=x + (place + 0.5) * _CELL, y=_TOP - 6, class_="value")


def _row_names() -> Iterator[str]:
    for line, trace in enumerate(TRACES):
        for y, objectives in enumerate(OBJECTIVES):
            _, top = _place(0, 0, line, y)
            yield text(f"{trace}, {objectives}", x=_LEFT - 8, y=top + _CELL / 2 + 3, class_="end")


def _legend(y: float, lead: _Lead) -> Iterator[str]:
    shown = [("default holds 99 %", _HELD), ("not simulated", _EMPTY)]
    shown += [(f"{share * lead.most:+.0f} {lead.unit}", _colour(share)) for share in (-1.0, -0.25, 0.0, 0.25, 1.0)]
    for place, (words, colour) in enumerate(shown):
        x = _LEFT + place * 130
        yield element("rect", x=x, y=y - 9, width=12, height=12, fill=colour, stroke="#999")
        yield text(words, x=x + 17, y=y + 1)
