"""The picture of the grid: a cell for every point, coloured by the lead of the default over the best other."""

from collections.abc import Iterator, Sequence
from html import escape

from alignedserve.sim.report.svg import element, number, text
from experiments.common import Row
from experiments.grid.points import ACCELERATORS, LOADS, OBJECTIVES, TRACES, Point

_CELL, _GAP = 24, 10  # of a cell; between panels
_LEFT, _TOP = 130, 62
_STYLE = """
text { font: 10px sans-serif; fill: #333 } .title { font-weight: bold } .cell { stroke: #fff }
.value { font-size: 8px; text-anchor: middle } .end { text-anchor: end } .middle { text-anchor: middle }
"""
_EMPTY, _HELD = "#f2f2f2", "#d9ead3"
_MOST = 20.0  # points: the deepest colours


def draw(rows: Sequence[Row]) -> str:
    """Draw all points; traces and objectives downwards, machines, best-effort work and rates to the right."""
    by_point = {row["point"]: row for row in rows}
    panels = [(count, beside) for count in ACCELERATORS for beside in (False, True)]
    width = _LEFT + len(panels) * (len(LOADS) * _CELL + _GAP)
    height = _TOP + len(TRACES) * (len(OBJECTIVES) * _CELL + _GAP) + 30
    parts = [element("style", _STYLE), *_headings(panels), *_row_names(), *_legend(height - 14)]
    for column, (accelerators, beside) in enumerate(panels):
        for line, trace in enumerate(TRACES):
            for x, load in enumerate(LOADS):
                for y, objectives in enumerate(OBJECTIVES):
                    point = Point(trace, load, objectives, accelerators, beside)
                    parts.append(_cell(*_place(column, x, line, y), point, by_point.get(point.name)))
    box = f"0 0 {number(width)} {number(height)}"
    label = "Attainment of the default less that of the best other, in points"
    return element("svg", *parts, xmlns="http://www.w3.org/2000/svg", viewBox=box, role="img", aria_label=label)


def _place(column: int, x: int, line: int, y: int) -> tuple[float, float]:
    left = _LEFT + column * (len(LOADS) * _CELL + _GAP) + x * _CELL
    return left, _TOP + line * (len(OBJECTIVES) * _CELL + _GAP) + y * _CELL


def _cell(x: float, y: float, point: Point, row: Row | None) -> str:
    words, value, colour = f"{point.name}: not simulated", "", _EMPTY
    if row is not None and "ahead" in row:
        value, colour = f"{row['ahead']:+.0f}", _colour(row["ahead"])
        words = f"{point.name}: {row['default']:.1f} %; {row['of']} {row['best']:.1f} %"
    elif row is not None:
        value, colour, words = "✓", _HELD, f"{point.name}: {row['default']:.1f} %"
    box = element("rect", x=x, y=y, width=_CELL, height=_CELL, fill=colour, class_="cell")
    label = text(value, x=x + _CELL / 2, y=y + _CELL / 2 + 3, class_="value")
    return element("g", element("title", escape(words)), box, label)


def _colour(ahead: float) -> str:
    """Return white for equal, blue for ahead, red for behind."""
    depth = min(abs(ahead) / _MOST, 1.0)
    pale, faint = round(255 - 175 * depth), round(255 - 115 * depth)
    return f"rgb({pale},{faint},255)" if ahead >= 0 else f"rgb(255,{faint},{pale})"


def _headings(panels: Sequence[tuple[int, bool]]) -> Iterator[str]:
    yield text("Attainment of aligned_slo elastic less the best of the others, points", x=8, y=16, class_="title")
    for column, (accelerators, beside) in enumerate(panels):
        x, _ = _place(column, 0, 0, 0)
        words = f"{accelerators} accelerators, {'best-effort beside' if beside else 'alone'}"
        yield text(words, x=x, y=_TOP - 22)
        for place, load in enumerate(LOADS):
            yield text(f"{load:.0%}", x=x + (place + 0.5) * _CELL, y=_TOP - 6, class_="value")


def _row_names() -> Iterator[str]:
    for line, trace in enumerate(TRACES):
        for y, objectives in enumerate(OBJECTIVES):
            _, top = _place(0, 0, line, y)
            yield text(f"{trace}, {objectives}", x=_LEFT - 8, y=top + _CELL / 2 + 3, class_="end")


def _legend(y: float) -> Iterator[str]:
    shown = [("default holds 99 %", _HELD), ("not simulated", _EMPTY)]
    shown += [(f"{ahead:+.0f} points", _colour(ahead)) for ahead in (-20.0, -5.0, 0.0, 5.0, 20.0)]
    for place, (words, colour) in enumerate(shown):
        x = _LEFT + place * 130
        yield element("rect", x=x, y=y - 9, width=12, height=12, fill=colour, stroke="#999")
        yield text(words, x=x + 17, y=y + 1)
