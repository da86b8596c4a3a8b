"""Run tests of one tier in several plain pytest processes: `python scripts/run_tests.py default`.

Each process gets whole files, dealt out by what they cost in an earlier run (tests/seconds.json). docs/testing.md says
which tiers there are and what each is for.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "tests"
SECONDS = ROOT / "tests" / "seconds.json"
NUM_PARTS = 8
MAX_PROCESSES = 4  # a gigabyte each
MAX_RERUN = 5  # a busy machine explains no more failures than that
# Of a file that no earlier run has seen: of clusters and hosts, and others.
UNKNOWN_CLUSTER_S = 60.0
UNKNOWN_S = 2.0
NOT_HERE = "not gpu and not clients"

_PROGRESS = re.compile(r"\[\s*\d+%\]$")
_MARKS_OF_FILE = re.compile(r"^pytestmark = (\[\n[^\]]*|[^\n]*)", re.MULTILINE)
_TAKES_CLUSTER = re.compile(r"def test_\w+\([^)]*\b(?:separate_)?cluster: Serving")


@dataclass(frozen=True, slots=True)
class Tier:
    """A set of tests by marker, in one of `NUM_PARTS` parts of its files or whole."""

    name: str
    marker: str
    word: str  # stands in every file with such a test, or in a conftest.py above it
    num_waiting: int = 0  # processes more than there are cores, as tests of a cluster mostly wait

    def files(self, folders: Sequence[str]) -> list[str]:
        """Return the files under `folders` that may hold tests of this tier, sorted."""
        return [file for file in _test_files(folders) if self._may_hold(file)]

    def _may_hold(self, file: str) -> bool:
        if self.name == "default":
            return not is_slow_file(ROOT / file)
        if self.name == "rest" and _is_marked(ROOT / file, "promise"):
            return False
        return any(self.word in path.read_text(encoding="utf-8") for path in _file_and_conftests(ROOT / file))


TIERS = {
    tier.name: tier
    for tier in (
        Tier("default", f"not slow and {NOT_HERE}", "", num_waiting=1),
        Tier("promise", f"slow and promise and {NOT_HERE}", "promise"),
        Tier("rest", f"slow and not promise and {NOT_HERE}", "slow"),
    )
}


@dataclass(slots=True)
class Outcome:
    """What the processes of a run said: seconds by test, counts by outcome, the tests that failed."""

    seconds: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    is_broken: bool = False  # a process ended in another way than with its tests' outcome


class PytestProcess:
    """One pytest process over some files; shows its progress at once and keeps the rest of its output."""

    def __init__(self, folder: Path, name: str, marker: str, tests: Sequence[str]) -> None:
        self._report = folder / f"{name}.xml"
        self._cache = folder / f"{name}.cache"
        cache = ("-o", f"cache_dir={self._cache}")
        report = (f"--junitxml={self._report}", "-o", "junit_family=xunit1")
        command = [sys.executable, "-m", "pytest", "-m", marker, *cache, *report, *tests]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if _PROGRESS.search(line):
                print(line, end="", flush=True)
            else:
                self._lines.append(line)

    def add_to(self, outcome: Outcome) -> None:
        """Wait for the end, print what the process had to say, and add its results."""
        self._reader.join()
        code = self._process.wait()
        if code not in (0, 5):  # 5: no test was chosen
            print("".join(self._lines), flush=True)
        outcome.is_broken |= code not in (0, 1, 5)
        if self._report.exists():
            self._read_report(outcome)
        failed = self._cache / "v" / "cache" / "lastfailed"
        if code == 1 and failed.exists():
            outcome.failed += json.loads(failed.read_text())

    def _read_report(self, outcome: Outcome) -> None:
        for suite in ET.parse(self._report).getroot().iter("testsuite"):
            problems = {kind: int(suite.get(kind, 0)) for kind in ("failures", "errors", "skipped")}
            outcome.counts += Counter(problems)
            outcome.counts["passed"] += int(suite.get("tests", 0)) - sum(problems.values())
        for case in ET.parse(self._report).getroot().iter("testcase"):
            test = f"{_file_of(case.get('classname', ''))}::{case.get('name')}"
            outcome.seconds[test] = outcome.seconds.get(test, 0.0) + float(case.get("time", 0))


def _file_of(class_name: str) -> str:
    """Return the file of a test's module, whose name may have the test's class behind it."""
    names = class_name.split(".")
    return "/".join(names[:-1] if names[-1].startswith("Test") else names) + ".py"


def is_slow_file(path: Path) -> bool:
    """Return whether every test of a file is slow, as its `pytestmark` says."""
    return _is_marked(path, "slow")


def _is_marked(path: Path, mark: str) -> bool:
    marks = _MARKS_OF_FILE.search(path.read_text(encoding="utf-8"))
    return marks is not None and f"mark.{mark}" in marks.group(1)


def deal(files: Iterable[str], seconds: Mapping[str, float], count: int) -> list[list[str]]:
    """Deal files into `count` lists that take about as long; files that share a cluster stay together."""
    groups: dict[str, list[str]] = {}
    for file in files:
        groups.setdefault(_shared_with(file), []).append(file)
    costs = {name: sum(_seconds_of(file, seconds) for file in group) for name, group in groups.items()}
    hands: list[list[str]] = [[] for _ in range(count)]
    totals = [0.0] * count
    for name in sorted(groups, key=lambda name: (-costs[name], name)):
        least = totals.index(min(totals))
        hands[least] += groups[name]
        totals[least] += costs[name]
    return hands


def run(tier: Tier, files: Sequence[str], part: int | None, num_processes: int) -> Outcome:
    """Run the tests of a tier in `files`, or one part of them; tests that run alone come last, in one process."""
    seconds = _recorded_seconds(tier.name)
    if part is not None:
        files = deal(files, seconds, NUM_PARTS)[part]
    outcome = Outcome()
    _run_processes(outcome, f"({tier.marker}) and not alone", deal(files, seconds, num_processes), tier.name)
    alone = [file for file in files if "mark.alone" in (ROOT / file).read_text(encoding="utf-8")]
    _run_processes(outcome, f"({tier.marker}) and alone", [alone], f"{tier.name}-alone")
    return outcome


def rerun_failed(outcome: Outcome, name: str) -> None:
    """Run what failed once more with nothing beside it, as a busy machine may disturb tests of real processes."""
    if outcome.is_broken or not 0 < len(outcome.failed) <= MAX_RERUN:
        return
    print("== Failed, and run once more with nothing beside them:", *outcome.failed, sep="\n", flush=True)
    again = Outcome()
    _run_processes(again, "", [outcome.failed], f"{name}-again")
    num_passed = len(outcome.failed) - len(again.failed)
    outcome.counts["passed"] += num_passed
    outcome.counts["failures"] -= num_passed
    outcome.failed, outcome.is_broken = again.failed, again.is_broken


def _run_processes(outcome: Outcome, marker: str, hands: Sequence[Sequence[str]], name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # of this run alone: another may go on in the same checkout
        started = [
            PytestProcess(Path(folder), f"{name}-{number}", marker, hand) for number, hand in enumerate(hands) if hand
        ]
        for process in started:
            process.add_to(outcome)


def _test_files(folders: Sequence[str]) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("test_*.py"))


def _file_and_conftests(path: Path) -> list[Path]:
    tests = ROOT / "tests"
    above = [parent / "conftest.py" for parent in path.parents if parent != tests and tests in parent.parents]
    return [path, *(conftest for conftest in above if conftest.exists())]


def _shared_with(file: str) -> str:
    """Return what the tests of this file share with others: a cluster, a set of hosts, or nothing (its own name)."""
    if not file.startswith("tests/cluster/"):
        return file
    source = (ROOT / file).read_text(encoding="utf-8")
    if "namespace_hosts" in source or "cluster_demo" in source:
        return file if "mark.alone" in source else "hosts of namespaces"
    return "shared clusters" if _TAKES_CLUSTER.search(source) else file


def _seconds_of(file: str, recorded: Mapping[str, float]) -> float:
    return recorded.get(file, UNKNOWN_CLUSTER_S if file.startswith("tests/cluster/") else UNKNOWN_S)


def _recorded_seconds(tier: str) -> dict[str, float]:
    recorded: dict[str, dict[str, float]] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    return recorded.get(tier, {})


def _record(tier: str, outcome: Outcome) -> None:
    by_file: Counter[str] = Counter()
    for test, seconds in outcome.seconds.items():
        by_file[test.partition("::")[0]] += seconds  # type: ignore[assignment]  # a counter of seconds
    recorded = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    kept = recorded.get(tier, {}) | {file: round(seconds, 1) for file, seconds in by_file.items()}
    recorded[tier] = {file: kept[file] for file in sorted(kept) if (ROOT / file).exists()}
    SECONDS.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")


def _seconds_path(tier: str) -> Path:
    return RESULTS / f"{tier}.json"


def _last_run(tier: str) -> dict[str, float]:
    path = _seconds_path(tier)
    return json.loads(path.read_text()) if path.exists() else {}


def print_dearest(seconds: Mapping[str, float], count: int = 10) -> None:
    """Print the tests that took longest."""
    print(f"The {count} dearest tests:")
    for test in sorted(seconds, key=lambda test: -seconds[test])[:count]:
        print(f"{seconds[test]:8.1f} s  {test}")


def main() -> int:
    """Run what the command line names; 0 when nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tiers", nargs="*", choices=[*TIERS, []], help="one after the other")
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
        _run_tier(TIERS[name], arguments.under, part, arguments.processes, arguments.record) for name in arguments.tiers
    ]
    if arguments.dearest:
        print_dearest({test: s for name in TIERS for test, s in _last_run(name).items()})
    return 0 if all(is_whole) else 1


def _run_tier(tier: Tier, folders: Sequence[str], part: int | None, num_processes: int, is_recorded: bool) -> bool:
    began_s = time.monotonic()
    num_processes += tier.num_waiting
    outcome = run(tier, tier.files(folders), part, num_processes)
    if is_recorded:
        _record(tier.name, outcome)
    rerun_failed(outcome, tier.name)
    _seconds_path(tier.name).write_text(json.dumps(outcome.seconds))
    counts = outcome.counts
    which = tier.name if part is None else f"part {part} of {NUM_PARTS} of {tier.name}"
    print(f"{which}: {time.monotonic() - began_s:.0f} s, {len(outcome.seconds)} tests, {num_processes} processes")
    num_failed = counts["failures"] + counts["errors"]
    print(f"{tier.name}: {counts['passed']} passed, {num_failed} failed, {counts['skipped']} skipped", flush=True)
    return not outcome.is_broken and not outcome.failed


if __name__ == "__main__":
    sys.exit(main())
