"""Write the table of docs/replay.md that compares simulated and live runs, from their records.

    python -m benchmarks.simulation.live_table

It stands behind a line `<!-- table: simulated against live -->`; tests/unit/docs/test_live_table.py holds page and
records together.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.page_tables import put_table
from benchmarks.measuring.recorded_loads import FITTED, JUDGED, LOADS
from benchmarks.measuring.recording import read_figures

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"
SHAPES = [(model, topology) for model in ("pocket", "opt-125m", "smollm2") for topology in ("elastic", "colocated")]
_THROUGHPUT = JUDGED[0]
_HEAD = "| shape | load | requests | throughput | TTFT p50, p90 | TBT p50, p90 | the live system by itself |"


def table() -> str:
    """Return the table: a row for each judged load of each shape that was recorded in rounds."""
    recorded = [(*shape, read_figures(f"simulation/simulated_vs_live_{'_'.join(shape)}")) for shape in SHAPES]
    rows = [
        f"| {model}, {topology} | {load} | {_cells(figures['runs'][load])} |"
        for model, topology, figures in recorded
        if figures is not None and "rounds" in figures
        for load in LOADS
        if load != FITTED
    ]
    return "\n".join([_HEAD, "|---" * (_HEAD.count("|") - 1) + "|", *rows]) + "\n"


def range_of(*measures: str) -> tuple[float, float]:
    recorded = [read_figures(f"simulation/simulated_vs_live_{'_'.join(shape)}") for shape in SHAPES]
    found = [
        one["ratio"]
        for figures in recorded
        if figures is not None and "rounds" in figures
        for load, run in figures["runs"].items()
        if load != FITTED
        for one in run["measures"]
        if one["class_name"] == "all" and one["measure"] in measures
    ]
    return round(min(found), 2), round(max(found), 2)


def with_table(page: str) -> str:
    return put_table(page, "simulated against live", table())


def _cells(run: Mapping[str, Any]) -> str:
    ratios = {one["measure"]: one["ratio"] for one in run["measures"] if one["class_name"] == "all"}
    shown = {name: _shown(ratios.get(name), run["within_bounds"].get(name, True)) for name in JUDGED}
    itself = run["odd_by_even_rounds"]
    own = ", ".join(f"{itself[name]:.2f}" for name in JUDGED if name in itself) or "one round"
    ttft, tbt = (", ".join(shown[f"{kind} p{percent}, s"] for percent in (50, 90)) for kind in ("ttft", "tbt"))
    return f"{run['num_requests']} | {shown[_THROUGHPUT]} | {ttft} | {tbt} | {own}"


def _shown(ratio: float | None, is_within: bool) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if is_within else f"**{ratio:.2f}**"


def main() -> None:
    """Write the table anew; say whether it has changed."""
    parser_of(__doc__).parse_args()
    before = PAGE.read_text()
    after = with_table(before)
    if after != before:
        PAGE.write_text(after)
        print(PAGE)


if __name__ == "__main__":
    main()
