"""Picture of hit rates by trace and size, from what `benchmarks.prefix_cache.eviction` recorded.

python -m benchmarks.prefix_cache.eviction_figure
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alignedserve.sim.report.svg import Frame, Scale, element, logarithmic, mark, path, picture, text
from benchmarks.prefix_cache.eviction import BELADY, PRODUCT
from benchmarks.support.recording import read_figures

RECORD = "eviction_by_size"
PICTURE = Path(__file__).parents[2] / "docs" / "prefix-cache.svg"
_SERIES = {"unbounded": "#888888", BELADY: "#b35c00", PRODUCT: "#0b62a4", "ideal LRU": "#4a8f29"}
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.name{font-weight:bold}.grid{stroke:#ddd}.axis{stroke:#444}"
    "path{fill:none;stroke-width:2}"
)
_WIDTH, _HEIGHT = 380, 270
_GROUND = element("rect", width="100%", height="100%", fill="#fff")


def figure(rows: Sequence[dict[str, Any]]) -> str:
    """Return one plot per trace, side by side, and a legend below."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    plots = [
        element("g", _plot(trace, [row for row in rows if row["trace"] == trace]), transform=f"translate({place} 0)")
        for place, trace in zip(range(0, _WIDTH * len(traces), _WIDTH), traces, strict=True)
    ]
    legend = [
        element("g", _marked(style, colour, 60 + 130 * style, _HEIGHT + 14, name))
        for style, (name, colour) in enumerate(_SERIES.items())
    ]
    label = "Hit rates of prefix caches by their size"
    drawn = picture(_WIDTH * len(traces), _HEIGHT + 30, label, element("style", _STYLE), _GROUND, *plots, *legend)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _marked(style: int, colour: str, x: float, y: float, name: str) -> str:
    words = text(name, x=x + 12, y=y + 4)
    return element("g", mark(style, x, y), fill=colour, stroke=colour) + words


def _plot(trace: str, rows: Sequence[dict[str, Any]]) -> str:
    sizes = sorted({row["capacity"] for row in rows if "capacity" in row})
    frame = Frame(logarithmic(sizes), Scale(0.0, 0.6), "blocks of 512 tokens", f"hit rate: {trace}", _WIDTH, _HEIGHT)
    parts = [frame.axes(y_is_share=True)]
    for style, (name, colour) in enumerate(_SERIES.items()):
        points = [
            frame.at(size, row["hit_rate"])
            for size in sizes
            for row in rows
            if row["order"] == name and row.get("capacity", size) == size
        ]
        marks = "".join(mark(style, x, y) for x, y in points)
        parts.append(element("g", element("path", d=path(points)), marks, stroke=colour))
    return "".join(parts)


def main() -> None:
    """Draw what is recorded."""
    figures = read_figures(RECORD)
    if figures is None:
        raise SystemExit(f"nothing is recorded; run benchmarks.prefix_cache.eviction with --name {RECORD}")
    PICTURE.write_text(figure(figures["rows"]) + "\n")
    print(PICTURE)


if __name__ == "__main__":
    main()
