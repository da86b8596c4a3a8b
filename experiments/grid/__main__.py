"""The default, `aligned_slo` elastic, beside the best of all others at every point of a grid.

    python -m experiments.grid [--processes N] [--points PATTERN ...] [--again COMMIT ...] [--quick]
    python -m experiments.grid --seeds | --summary | --capacity

Five traces, six rates, three kinds of objectives, 2 to 8 accelerators, with and without best-effort work: 540 points.
Others: fcfs, sarathi at the best of its token budgets for the point, `aligned_slo`; colocated and in every split. What
has ended is in results/grid.jsonl at once; called again it goes on where it was. The summary, results/grid.json and the
pictures of docs/experiments/grid.md, is made of that record alone.
"""

import argparse
import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import track

from alignedserve.cli.machine import describe_machine
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import commit
from experiments.common import write_record
from experiments.grid.picture import PICTURES
from experiments.grid.points import LOADS, MIXED, TRACES, Point, all_points
from experiments.grid.record import PATH, Record, Run, append_run
from experiments.grid.search import repeat_point, search_task, simulate
from experiments.grid.summary import points_apart, show, summary_of
from experiments.grid.systems import DEFAULT, HARDWARE, MODEL, UNION

_QUICK = ("azure_code/1.02/tight/2/alone",)
_HELD = 0.9  # of the requests, for a capacity


def main() -> None:
    """Simulate what is missing, and summarise."""
    options = _read_options()
    if options.capacity:
        for trace in TRACES:
            print(f"{trace}: {capacity(trace):.3g} requests/s of one accelerator")
        return
    if options.quick:
        with TemporaryDirectory() as folder:
            run([point for point in all_points() if point.name in _QUICK], Path(folder) / "grid.jsonl", processes=1)
            show(summary_of(Record(Path(folder) / "grid.jsonl")))
        return
    if options.seeds:
        _repeat(PATH)
    elif not options.summary:
        chosen = [point for point in all_points() if any(fnmatch(point.name, one) for one in options.points)]
        run(chosen, PATH, processes=options.processes, again=options.again, systems=options.systems)
    summary = summary_of(Record(PATH))
    show(summary)
    write_record("grid", summary)
    for name, draw in PICTURES.items():
        Path("docs/experiments", name).write_text(draw(summary["points"]))


def _read_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--processes", type=int, default=2, help="points at a time")
    parser.add_argument("--points", nargs="+", default=["*"], help="only these: 'azure_code/*/2/*'")
    parser.add_argument("--again", nargs="+", default=(), metavar="COMMIT", help="forget what was simulated at these")
    parser.add_argument("--systems", default=f"{UNION} *", help="of these alone ('%(default)s')")
    parser.add_argument("--seeds", action="store_true", help="repeat, with more seeds, points that are apart")
    parser.add_argument("--summary", action="store_true", help="simulate nothing")
    parser.add_argument("--capacity", action="store_true", help="find the rate that one accelerator carries")
    parser.add_argument("--quick", action="store_true", help="one point, under a minute; nothing is recorded")
    return parser.parse_args()


# --- runs


def run(points: Sequence[Point], path: Path, *, processes: int, again: Sequence[str] = (), systems: str = "*") -> None:
    """Search these points, each in a process, and append to the record of this path.

    `again`: commits whose outcomes of `systems`, a pattern, no longer count, at these points and at all others.
    """
    append_run(path, Run(commit(), describe_machine(), MODEL, HARDWARE, tuple(again), systems if again else "*"))
    tasks = [(point, path) for point in points]
    if processes <= 1:
        for task in track(tasks, "points", transient=True):
            search_task(task)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for _ in track(pool.imap_unordered(search_task, tasks), "points", total=len(tasks), transient=True):
            pass


def _repeat(path: Path) -> None:
    """Repeat with further seeds the points at which the default or another is ahead, those behind first."""
    append_run(path, Run(commit(), describe_machine(), MODEL, HARDWARE))
    for point in track(points_apart(Record(path)), "points", transient=True):
        repeat_point(point, Record(path), simulate)


def capacity(trace: str) -> float:
    """Return the rate of one of two accelerators at which the default holds nine requests of ten.

    Of mixed objectives, without best-effort work; to 5 %, by bisection. What the others hold there is not asked.
    """
    base = Point(trace, LOADS[0], MIXED, 2, has_best_effort=False)
    low, high = 0.1, 8.0  # as shares of the capacity that is written down
    for _ in islice(iter(int, 1), 8):
        middle = (low * high) ** 0.5
        outcome = simulate(replace(base, load=middle), DEFAULT, None)
        low, high = (middle, high) if outcome.attainment >= _HELD else (low, middle)
    return low * TRACES[trace].capacity


if __name__ == "__main__":
    main()
