"""The default, `aligned_slo` elastic, beside the best of the field at every point of a grid, in steady state.

    python -m experiments.grid [--cpu-minutes N] [--points PATTERN ...] [--processes N] [--again]
    python -m experiments.grid --seeds N --minutes M | --summary | --capacity | --quick

Five traces, five rates, two kinds of objectives, 2 and 4 accelerators, with and without best-effort work: 200 points of
ten simulated minutes and five seeds each. What has ended is in results/grid.jsonl at once; called again it goes on
where it was. The summary, results/grid.json and the pictures of docs/experiments/grid.md, is made of that record alone.
"""

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import track

from benchmarks.measuring.arguments import parser_of
from experiments.common import write_record
from experiments.grid.picture import PICTURES
from experiments.grid.points import LOADS, MINUTES, MIXED, SEEDS, TRACES, Point, all_points
from experiments.grid.record import PATH, Record, Run, append_run
from experiments.grid.search import SearchTask, search_task, simulate
from experiments.grid.summary import row_of, show, summary_of
from experiments.grid.systems import DEFAULT, HARDWARE, MODEL
from lab.commands.machine import describe_machine

_QUICK = ("azure_code/1.02/tight/2/alone",)
_HELD = 0.9  # of the requests, for a capacity


def main() -> None:
    """Simulate what is missing, and summarise."""
    options = _read_options()
    if options.capacity:
        for trace in TRACES:
            print(f"{trace}: {capacity(trace):.3g} requests/s of one accelerator")
        return
    seeds = tuple(range(1, options.seeds + 1))
    wanted = [one for one in all_points(options.minutes) if any(fnmatch(one.name, name) for name in options.points)]
    if options.quick or len(seeds) < len(SEEDS) or options.minutes < MINUTES:
        _try([one for one in wanted if one.name.startswith(_QUICK)] if options.quick else wanted, seeds)
        return
    if not options.summary:
        tasks = [SearchTask(point, PATH, seeds, options.again) for point in wanted]
        run(tasks, processes=options.processes, most_cpu_s=60 * options.cpu_minutes)
    summary = summary_of(Record(PATH))
    show(summary)
    write_record("grid", summary)
    for name, draw in PICTURES.items():
        Path("docs/experiments", name).write_text(draw(summary["points"]))


def _read_options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--processes", type=int, default=1, help="points at a time")
    parser.add_argument("--cpu-minutes", type=float, default=60.0, help="no point is begun after these")
    parser.add_argument("--points", nargs="+", default=["*"], help="only these: 'azure_code/*/2/*'")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="of every point; fewer are not recorded")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of arrivals; fewer are not recorded")
    parser.add_argument("--again", action="store_true", help="simulate anew what an older decision code decided")
    parser.add_argument("--summary", action="store_true", help="simulate nothing")
    parser.add_argument("--capacity", action="store_true", help="find the rate that one accelerator carries")
    parser.add_argument("--quick", action="store_true", help="one point of a minute; nothing is recorded")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.minutes = 2, 1.0
    return options


# --- runs


def run(tasks: Sequence[SearchTask], *, processes: int, most_cpu_s: float) -> None:
    """Search these points and append to their record, until so many seconds of processors are used."""
    append_run(tasks[0].path, Run(describe_machine(), MODEL, HARDWARE))
    used_s = 0.0
    for cpu_s in _searched(tasks, processes):
        used_s += cpu_s
        if used_s >= most_cpu_s:
            break


def _searched(tasks: Sequence[SearchTask], processes: int) -> Iterator[float]:
    if processes <= 1:
        yield from map(search_task, track(tasks, "points", transient=True))
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from track(pool.imap_unordered(search_task, tasks), "points", total=len(tasks), transient=True)


def _try(points: Sequence[Point], seeds: Sequence[int]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "grid.jsonl"
        for point in points:
            search_task(SearchTask(point, path, seeds))
            print(row_of(point, Record(path), seeds))


def capacity(trace: str) -> float:
    """Return the rate of one of two accelerators at which the default holds nine requests of ten.

    Of mixed objectives, without best-effort work; to 5 %, by bisection. What the others hold there is not asked.
    """
    base = Point(trace, LOADS[0], MIXED, 2, has_best_effort=False, minutes=1.0)
    low, high = 0.1, 8.0  # as shares of the capacity that is written down
    for _ in islice(iter(int, 1), 8):
        middle = (low * high) ** 0.5
        outcome = simulate(replace(base, load=middle), DEFAULT, 0)
        low, high = (middle, high) if outcome.attainment >= _HELD else (low, middle)
    return low * TRACES[trace].capacity


if __name__ == "__main__":
    main()
