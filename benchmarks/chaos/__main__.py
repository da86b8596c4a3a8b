"""Faults against every process of a cluster, by seeded schedules: is an answer or a line lost, doubled or wrong?

    python -m benchmarks.chaos --seeds 0:2000                    # rooms: real processes and sockets, without Ray
    python -m benchmarks.chaos --covering 40                     # so many that cover every pair
    python -m benchmarks.chaos --seeds 17 --shrink               # the shortest part of it that fails

Every schedule is bursts of streams and a batch, with one to three faults meanwhile. Records are appended to the output
as they come, and seeds that it has already are left out, so a run that was ended goes on. The disks of state, logs and
shared memory are filled only where the program may mount small ones in a namespace of its own. Target: every schedule
survived.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.rooms import Rooms, mount_small
from benchmarks.chaos.run import Stage, run_all
from benchmarks.chaos.schedules import ChaosSchedule, covering, make_schedule, shrink
from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.recording import RESULTS, write_result

_LONGEST = 5  # recoveries that are named


def summary_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    faults = [(record, fault) for record in records for fault in record["faults"] if fault["was_there"]]
    endings: Counter[str] = Counter()
    for record in records:
        endings.update(record["outcome"]["endings"])
    failed = [record for record in records if not record["is_survived"]]
    recoveries = sorted((record["outcome"]["recovered_s"] or 0.0 for record in records), reverse=True)
    return {
        "num_schedules": len(records),
        "num_not_survived": len(failed),
        "num_faults": len(faults),
        "num_faults_impossible_here": sum(len(record["faults"]) for record in records) - len(faults),
        "num_streams": endings.total(),
        "lines_lost": sum(record["outcome"]["lines_lost"] for record in records),
        "lines_doubled": sum(record["outcome"]["lines_doubled"] for record in records),
        "lines_wrong": sum(record["outcome"]["lines_wrong"] for record in records),
        "endings": dict(endings),
        "recovered_s": {
            "median": recoveries[len(recoveries) // 2] if recoveries else None,
            "longest": recoveries[:_LONGEST],
        },
        "by_fault": _rows(faults),
        "by_phase": dict(Counter(fault["phase"] for _, fault in faults)),
        "phases_hit": dict(Counter(name for _, fault in faults for name in fault["phases_hit"])),
        "not_survived": [{name: value for name, value in record.items() if name != "logs"} for record in failed],
    }


def _rows(faults: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return a row for each target and hit: how many schedules had it, how many of those were survived, and endings.

    Endings are of schedules whose only fault it was.
    """
    rows: dict[str, dict[str, Any]] = {}
    for record, fault in faults:
        row = rows.setdefault(
            f"{fault['target']}: {fault['hit']}", {"schedules": 0, "survived": 0, "endings_alone": Counter()}
        )
        row["schedules"] += 1
        row["survived"] += record["is_survived"]
        if len(record["faults"]) == 1:
            row["endings_alone"].update(record["outcome"]["endings"])
    return {name: row | {"endings_alone": dict(row["endings_alone"])} for name, row in sorted(rows.items())}


_IN_NAMESPACE = "CHAOS_HAS_SMALL_DISKS"
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_SIZE = "64m"


def main() -> None:
    """Run, and record."""
    arguments = _arguments()
    _enter_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the rooms are ended
    has_small_disks = os.environ.get(_IN_NAMESPACE) == "1" and mount_small(_SHARED_MEMORY, _SHARED_SIZE)
    schedules = covering(arguments.covering) if arguments.covering else tuple(map(make_schedule, arguments.seeds))
    schedules = schedules[arguments.part]
    output: Path = arguments.output or RESULTS / "faults/chaos_rooms.jsonl"
    make = partial(Rooms, has_small_disks=has_small_disks)
    if arguments.shrink:
        for schedule in schedules:
            print(_shortest(make, schedule), flush=True)
        return
    known = _recorded(output)
    deadline_s = time.monotonic() + arguments.stop_after if arguments.stop_after else None
    missing = _until(deadline_s, (one for one in schedules if one.seed not in known))
    run_all(make, missing, lambda record: _record(output, record))
    wanted = {one.seed for one in schedules}
    figures = summary_of([record for seed, record in sorted(_recorded(output).items()) if seed in wanted])
    if arguments.name:
        write_result(arguments.name, figures, command=_repeated(arguments))
    print(json.dumps({name: value for name, value in figures.items() if not isinstance(value, dict | list)}))
    if figures["num_not_survived"]:
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=_seeds, default=range(40), help="A:B, or one")
    parser.add_argument("--covering", type=int, default=0, help="so many that cover every pair, in place of seeds")
    parser.add_argument("--shrink", action="store_true", help="cut failing schedules down to their shortest part")
    parser.add_argument("--part", type=_part, default=slice(None), help="I/N: every N-th schedule from the I-th on")
    parser.add_argument("--stop-after", type=float, default=0.0, help="seconds; begin no schedule later")
    parser.add_argument("--output", type=Path, help="records, one a line; by default among the results")
    parser.add_argument("--name", default="", help="of the result in which all is summed up; empty: none")
    return parser.parse_args()


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def _repeated(arguments: argparse.Namespace) -> str:
    seeds: range = arguments.seeds
    chosen = f"--covering {arguments.covering}" if arguments.covering else f"--seeds {seeds.start}:{seeds.stop}"
    return f"python -m benchmarks.chaos {chosen}"


def _part(text: str) -> slice:
    first, _, count = text.partition("/")
    return slice(int(first) - 1, None, int(count))


def _enter_namespace() -> None:
    unshare = shutil.which("unshare")
    if _IN_NAMESPACE in os.environ or unshare is None:
        return
    own = [unshare, "--mount", *(() if os.getuid() == 0 else ("--user", "--map-root-user"))]
    may = subprocess.run([*own, "true"], capture_output=True, check=False).returncode == 0
    os.environ[_IN_NAMESPACE] = "1" if may else "0"
    if may:
        os.execv(unshare, [*own, sys.executable, "-m", "benchmarks.chaos", *sys.argv[1:]])


def _until(deadline_s: float | None, schedules: Iterable[ChaosSchedule]) -> Iterable[ChaosSchedule]:
    for schedule in schedules:
        if deadline_s is not None and time.monotonic() > deadline_s:
            return
        yield schedule


def _record(output: Path, record: dict[str, Any]) -> None:
    with output.open("a") as file:
        file.write(json.dumps(record) + "\n")
    faults = ", ".join(f"{fault['target']} {fault['hit']} ({fault['phase']})" for fault in record["faults"])
    said = "ok" if record["is_survived"] else "; ".join(record["problems"])
    print(f"{record['seed']:>5} {record['took_s']:6.2f} s  {faults}: {said}", flush=True)


def _recorded(output: Path) -> dict[int, dict[str, Any]]:
    lines = output.read_text().splitlines() if output.exists() else []
    records = (json.loads(line) for line in lines if line.endswith("}"))
    return {record["seed"]: record for record in records}


def _shortest(make: Callable[[Path], Rooms], schedule: ChaosSchedule) -> ChaosSchedule | str:
    stage = Stage(make)

    def fails(tried: ChaosSchedule) -> bool:
        record = stage.run(tried)
        print(f"  tried {len(tried.faults)} faults: {record['problems']}", flush=True)
        return not record["is_survived"]

    try:
        return shrink(schedule, fails) if fails(schedule) else f"{schedule.seed} is survived"
    finally:
        stage.close()


if __name__ == "__main__":
    main()
