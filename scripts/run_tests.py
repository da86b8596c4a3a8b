"""Run tests of one tier in several pytest processes: `python scripts/run_tests.py default`.

A process takes a file when it is free, the dearest first, by seconds of earlier runs: on this machine, or else in
tests/seconds.json. docs/testing.md says which tiers there are and what each is for.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.taken_files import LIST, OPTION  # noqa: E402

RESULTS = ROOT / "build" / "tests"  # seconds of each test, by tier
SECONDS = ROOT / "tests" / "seconds.json"  # of each file, by tier
TOGETHER = "tests/cluster/shared"  # its files share clusters: one process takes them all
NUM_PARTS = 8
MAX_PROCESSES = 4  # a gigabyte each
MAX_RERUN = 5  # a busy machine explains no more failures than that
LOOK_S, REPORT_S = 0.1, 10.0
# Of a file that no earlier run has seen: of clusters and hosts, and others.
UNKNOWN_CLUSTER_S = 60.0
UNKNOWN_S = 2.0
NOT_HERE = "not gpu and not clients"
MARKERS = {
    "default": f"not slow and {NOT_HERE}",
    "promise": f"slow and promise and {NOT_HERE}",
    "rest": f"slow and not promise and {NOT_HERE}",
}
NUM_WAITING = {"default": 1}  # processes more than there are cores, as a cluster mostly waits


@dataclass(slots=True)
class Outcome:
    """What the processes of a run said: seconds by test, counts by outcome, the tests that failed."""

    seconds: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    is_broken: bool = False  # a process ended in another way than with its tests' outcome


def run(hands: Sequence[Sequence[str]], marker: str, num_processes: int, root: str = "tests") -> Outcome:
    """Run tests of this marker in `hands`, lists of files or tests under `root`: a process takes one list at a time."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name:  # of this run alone: another may go on in the same checkout
        folder = Path(name)
        (folder / LIST).write_text(json.dumps(hands))
        command = [sys.executable, "-m", "pytest", "-m", marker, "-p", "no:cacheprovider"]
        command += ["-p", "scripts.taken_files", f"{OPTION}={name}", root]
        logs = [folder / f"{number}.log" for number in range(min(num_processes, len(hands)))]
        processes = []
        for log in logs:
            with log.open("w") as output:
                processes.append(subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output))
        _wait_for(processes, folder, len(hands))
        for process, log in zip(processes, logs, strict=True):
            if process.returncode not in (0, 5):  # 5: no test was chosen
                print(log.read_text(errors="replace"), flush=True)
            outcome.is_broken |= process.returncode not in (0, 1, 5)
        for results in (json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")):
            outcome.seconds |= results["seconds"]
            outcome.counts += Counter(results["counts"])
            outcome.failed += results["failed"]
    return outcome


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], folder: Path, num_hands: int) -> None:
    reported_s = time.monotonic()
    while any(process.poll() is None for process in processes):
        time.sleep(LOOK_S)
        if time.monotonic() - reported_s > REPORT_S:
            reported_s += REPORT_S
            print(f"{len(list(folder.glob('*.taken')))} of {num_hands} files begun", flush=True)


def rerun_failed(outcome: Outcome) -> None:
    """Run what failed once more with nothing beside it, as a busy machine may disturb tests of real processes."""
    if outcome.is_broken or not 0 < len(outcome.failed) <= MAX_RERUN:
        return
    print("== Failed, and run once more with nothing beside them:", *outcome.failed, sep="\n", flush=True)
    again = run([outcome.failed], "", 1)
    outcome.counts["passed"] += len(outcome.failed) - len(again.failed)
    outcome.failed, outcome.is_broken = again.failed, again.is_broken


def files_under(folders: Sequence[str]) -> list[str]:
    """Return all files of tests under these folders, sorted."""
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("test_*.py"))


def hands_of(files: Iterable[str], seconds: Mapping[str, float]) -> list[list[str]]:
    """Return lists of files that one process takes at once, the dearest first."""
    hands: dict[str, list[str]] = {}
    for file in files:
        hands.setdefault(TOGETHER if file.startswith(f"{TOGETHER}/") else file, []).append(file)
    return sorted(hands.values(), key=lambda hand: (-_cost(hand, seconds), hand))


def part_of(hands: Iterable[list[str]], seconds: Mapping[str, float], part: int) -> list[list[str]]:
    """Return one of `NUM_PARTS` parts of `hands`, which take about as long."""
    parts: list[list[list[str]]] = [[] for _ in range(NUM_PARTS)]
    totals = [0.0] * NUM_PARTS
    for hand in hands:
        least = totals.index(min(totals))
        parts[least].append(hand)
        totals[least] += _cost(hand, seconds)
    return parts[part]


def _cost(hand: Iterable[str], seconds: Mapping[str, float]) -> float:
    return sum(seconds.get(file, UNKNOWN_CLUSTER_S if "/cluster/" in file else UNKNOWN_S) for file in hand)


def seconds_by_file(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of files, whose tests took these."""
    by_file: dict[str, float] = {}
    for test, test_s in seconds.items():
        file = test.partition("::")[0]
        by_file[file] = by_file.get(file, 0.0) + test_s
    return by_file


def recorded_seconds(tier: str) -> dict[str, float]:
    """Return the committed seconds of each file in which this tier has tests; 0 for others that are known."""
    recorded: dict[str, dict[str, float]] = json.loads(SECONDS.read_text())
    known = {file: 0.0 for of_tier in recorded.values() for file in of_tier}
    return known | recorded.get(tier, {})


def _record(tier: str, seconds: Mapping[str, float]) -> None:
    recorded = json.loads(SECONDS.read_text())
    kept = recorded.get(tier, {}) | {file: round(s, 1) for file, s in seconds_by_file(seconds).items()}
    recorded[tier] = {file: kept[file] for file in sorted(kept) if (ROOT / file).exists()}
    SECONDS.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")


def last_run(tier: str) -> dict[str, float]:
    """Return the seconds of each test when it last ran here."""
    path = RESULTS / f"{tier}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def print_dearest(count: int = 10) -> None:
    """Print the tests that took longest."""
    seconds = {test: s for tier in MARKERS for test, s in last_run(tier).items()}
    print(f"The {count} dearest tests:")
    for test in sorted(seconds, key=lambda test: -seconds[test])[:count]:
        print(f"{seconds[test]:8.1f} s  {test}")


def run_tier(tier: str, folders: Sequence[str], part: int | None, num_processes: int, is_recorded: bool) -> bool:
    """Run the tests of a tier under these folders, or one part of them; return whether all passed."""
    began_s = time.monotonic()
    num_processes += NUM_WAITING.get(tier, 0)
    recorded = recorded_seconds(tier)
    hands = hands_of(files_under(folders), recorded)
    if part is not None:
        hands = part_of(hands, recorded, part)
    here = recorded | seconds_by_file(last_run(tier))
    outcome = run(hands_of((file for hand in hands for file in hand), here), MARKERS[tier], num_processes)
    if is_recorded:
        _record(tier, outcome.seconds)
    rerun_failed(outcome)
    kept = {test: s for test, s in last_run(tier).items() if (ROOT / test.partition("::")[0]).exists()}
    (RESULTS / f"{tier}.json").write_text(json.dumps(kept | outcome.seconds))
    which = tier if part is None else f"part {part} of {NUM_PARTS} of {tier}"
    print(f"{which}: {time.monotonic() - began_s:.0f} s, {len(outcome.seconds)} tests, {num_processes} processes")
    counts = outcome.counts
    print(f"{tier}: {counts['passed']} passed, {len(outcome.failed)} failed, {counts['skipped']} skipped", flush=True)
    return not outcome.is_broken and not outcome.failed


def main() -> int:
    """Run what the command line names; 0 when nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tiers", nargs="*", choices=[*MARKERS, []], help="one after the other")
    parser.add_argument("--under", nargs="+", default=["tests"], metavar="FOLDER", help="only files in these")
    parser.add_argument("--part", type=int, help=f"one of the {NUM_PARTS} parts of a tier; any whole number will do")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=min(cores, MAX_PROCESSES))
    parser.add_argument("--record", action="store_true", help="keep the seconds of each file for later runs")
    parser.add_argument("--dearest", action="store_true", help="print the longest tests of all tiers' last runs")
    arguments = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    part = None if arguments.part is None else arguments.part % NUM_PARTS
    is_whole = [
        run_tier(tier, arguments.under, part, arguments.processes, arguments.record) for tier in arguments.tiers
    ]
    if arguments.dearest:
        print_dearest()
    return 0 if all(is_whole) else 1


if __name__ == "__main__":
    sys.exit(main())
