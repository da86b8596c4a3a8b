"""Run tests of one tier in several pytest processes: `python scripts/run_tests.py default`.

A process that is free takes the next file of a list, the dearest first by seconds of earlier runs: on this machine, or
else in tests/seconds.json. docs/testing.md says which tiers there are. The second half is a plugin of those processes.
"""

import argparse
import fcntl
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest
from _pytest.runner import collect_one_node

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "tests"  # seconds of each test when it last ran here, by tier
SECONDS = ROOT / "tests" / "seconds.json"  # of each file, by tier
INSIDE_VLLM = "tests/inside_vllm"  # run by vLLM's own environment: `make test-vllm`
TOGETHER = "tests/cluster/shared/"  # its files share clusters: one process takes them all
NUM_PARTS = 8
MAX_PROCESSES = 4  # a gigabyte each
MAX_RERUN = 5  # a busy machine explains no more failures than that
REPORT_S = 10.0
UNKNOWN_CLUSTER_S, UNKNOWN_S = 60.0, 2.0  # of a file that no earlier run has seen
NOT_HERE = "not gpu and not clients"
FORK = "--fork"  # before what `_fork` takes: not for the command line of people
SHARED_MODULES = (
    "tests.conftest",  # first, as it says how others are imported
    "anthropic",
    "openai",
    "openai.resources.responses",
    "tests.gateway.conftest",
    "tests.gpu_kernels.conftest",
    "tests.harnesses.clusters.in_process",
    "tests.harnesses.simulation",
    "tests.support.models.tiny_engines",
    "tests.unit.cluster.conftest",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
)
_REWRITES = "pytest.PytestAssertRewriteWarning"
MARKERS = {
    "default": f"not slow and {NOT_HERE}",
    "promise": f"slow and promise and {NOT_HERE}",
    "rest": f"slow and not promise and {NOT_HERE}",
}


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
        (folder / "hands").write_text(json.dumps(hands))
        command = [sys.executable, "-m", "scripts.run_tests", FORK, str(folder), str(min(num_processes, len(hands)))]
        process = subprocess.Popen([*command, "-m", marker, f"--take-from={folder}", root], cwd=ROOT)
        while process.poll() is None:
            try:
                process.wait(REPORT_S)
            except subprocess.TimeoutExpired:
                print(f"{len(list(folder.glob('*.taken')))} of {len(hands)} files begun", flush=True)
        outcome.is_broken = process.returncode != 0
        for ended in folder.glob("*.ended"):
            code = int(ended.read_text())
            if code not in (0, 5):  # 5: no test was chosen
                print(ended.with_suffix(".log").read_text(errors="replace"), flush=True)
            outcome.is_broken |= code not in (0, 1, 5)
        for results in (json.loads(path.read_text()) for path in folder.glob("*.json")):
            outcome.seconds |= results["seconds"]
            outcome.counts += Counter(results["counts"])
            outcome.failed += results["failed"]
    return outcome


def _fork(folder: Path, num_processes: int, arguments: Sequence[str]) -> None:
    """Import once what nearly every test needs, ten seconds of a core, and run pytest in forks of this process."""
    gc.disable()
    for name in SHARED_MODULES:
        import_module(name)
    gc.freeze()
    # Whatever a plugin of pytest needs as well, such as anyio, is imported and not rewritten.
    arguments = ["-p", "no:cacheprovider", "-p", "scripts.run_tests", f"-Wignore::{_REWRITES}", *arguments]
    numbers = {}
    for number in range(num_processes):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a thread of OpenBLAS, which is prepared for forks
            pid = os.fork()
        if not pid:
            output = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, sys.stdout.fileno())
            os.dup2(output, sys.stderr.fileno())
            gc.enable()
            sys.exit(pytest.main(arguments))
        numbers[pid] = number
    while numbers:
        pid, status = os.wait()
        (folder / f"{numbers.pop(pid)}.ended").write_text(str(os.waitstatus_to_exitcode(status)))


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
    paths = sorted(path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("test_*.py"))
    return [str(path) for path in paths if not path.is_relative_to(INSIDE_VLLM)]


def hands_of(files: Iterable[str], seconds: Mapping[str, float]) -> list[list[str]]:
    """Return lists of files that one process takes at once, the dearest first."""
    hands: dict[str, list[str]] = {}
    for file in files:
        hands.setdefault(TOGETHER if file.startswith(TOGETHER) else file, []).append(file)
    return sorted(hands.values(), key=lambda hand: (-_cost(hand, seconds), hand))


def part_of(hands: Iterable[list[str]], seconds: Mapping[str, float], part: int) -> list[list[str]]:
    """Return one of `NUM_PARTS` parts of `hands`, which take about as long."""
    parts: list[list[list[str]]] = [[] for _ in range(NUM_PARTS)]
    costs = [0.0] * NUM_PARTS
    for hand in hands:
        cheapest = costs.index(min(costs))
        parts[cheapest].append(hand)
        costs[cheapest] += _cost(hand, seconds)
    return parts[part]


def _cost(hand: Iterable[str], seconds: Mapping[str, float]) -> float:
    return sum(seconds.get(file, UNKNOWN_CLUSTER_S if "/cluster/" in file else UNKNOWN_S) for file in hand)


def recorded_seconds(tier: str) -> dict[str, float]:
    """Return the committed seconds of each file in which this tier has tests; 0 of a file that others know."""
    recorded: dict[str, dict[str, float]] = json.loads(SECONDS.read_text())
    return {file: 0.0 for of_tier in recorded.values() for file in of_tier} | recorded.get(tier, {})


def _by_file(seconds: Mapping[str, float]) -> dict[str, float]:
    by_file: dict[str, float] = {}
    for test, test_s in seconds.items():
        file = test.partition("::")[0]
        by_file[file] = by_file.get(file, 0.0) + test_s
    return by_file


def _record(tier: str, seconds: Mapping[str, float]) -> None:
    recorded = json.loads(SECONDS.read_text())
    known = recorded.get(tier, {}) | {file: round(file_s, 1) for file, file_s in _by_file(seconds).items()}
    recorded[tier] = {file: file_s for file, file_s in known.items() if (ROOT / file).exists()}
    SECONDS.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n")


def _last_run(tier: str) -> dict[str, float]:
    path = RESULTS / f"{tier}.json"
    last: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return {test: test_s for test, test_s in last.items() if (ROOT / test.partition("::")[0]).exists()}


def run_tier(tier: str, folders: Sequence[str], part: int | None, num_processes: int, is_recorded: bool) -> bool:
    """Run the tests of a tier under these folders, or one part of them; return whether all passed."""
    began_s = time.monotonic()
    num_processes += tier == "default"  # whose cluster mostly waits
    recorded, last = recorded_seconds(tier), _last_run(tier)
    hands = hands_of(files_under(folders), recorded)
    if part is not None:
        hands = part_of(hands, recorded, part)
    files = [file for hand in hands for file in hand]
    outcome = run(hands_of(files, recorded | _by_file(last)), MARKERS[tier], num_processes)
    if is_recorded:
        _record(tier, outcome.seconds)
    rerun_failed(outcome)
    (RESULTS / f"{tier}.json").write_text(json.dumps(last | outcome.seconds))
    which = tier if part is None else f"part {part} of {NUM_PARTS} of {tier}"
    print(f"{which}: {time.monotonic() - began_s:.0f} s, {len(outcome.seconds)} tests, {num_processes} processes")
    counts = outcome.counts
    print(f"{tier}: {counts['passed']} passed, {len(outcome.failed)} failed, {counts['skipped']} skipped", flush=True)
    return not outcome.is_broken and not outcome.failed


def main() -> int:
    """Run what the command line names; 0 when nothing failed."""
    if sys.argv[1:2] == [FORK]:
        _fork(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tiers", nargs="*", choices=[*MARKERS, []], help="one after the other")
    parser.add_argument("--under", nargs="+", default=["tests"], metavar="FOLDER", help="only files in these")
    parser.add_argument("--part", type=int, help=f"one of the {NUM_PARTS} parts of a tier; any whole number will do")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=min(cores, MAX_PROCESSES))
    parser.add_argument("--record", action="store_true", help="keep the seconds of each file for later runs")
    parser.add_argument("--dearest", action="store_true", help="print the longest tests of all tiers' last runs")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    part = None if options.part is None else options.part % NUM_PARTS
    all_pass = [run_tier(tier, options.under, part, options.processes, options.record) for tier in options.tiers]
    if options.dearest:
        print("The ten dearest tests:")
        seconds = {test: test_s for tier in MARKERS for test, test_s in _last_run(tier).items()}
        for test in sorted(seconds, key=lambda test: -seconds[test])[:10]:
            print(f"{seconds[test]:8.1f} s  {test}")
    return 0 if all(all_pass) else 1


# The plugin: a file is imported once its process has taken it. Tests marked `alone` come last, while no other runs.
_modules: dict[Path, pytest.Module] = {}
_alone: list[list[pytest.Item]] = []
_ended_with: list[int] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the folder of the list, which gets the results as well."""
    parser.addoption("--take-from", type=Path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> bool:
    """Find files, and import none yet."""
    marker, session.config.option.markexpr = session.config.option.markexpr, ""  # would deselect the folder itself
    nodes = list(session.perform_collect(genitems=False))
    session.config.option.markexpr = marker
    while nodes:
        node = nodes.pop()
        if isinstance(node, pytest.Module):
            _modules[node.path] = node
        elif isinstance(node, pytest.Collector):
            nodes += collect_one_node(node).result
    session.items = []
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put off what runs alone."""
    _alone.append([item for item in items if item.get_closest_marker("alone")])
    items[:] = [item for item in items if not item.get_closest_marker("alone")]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run files until all are taken, then what runs alone."""
    folder: Path = session.config.getoption("take_from")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        for names in _taken(folder):
            _run(_collect(session, names))
        fcntl.flock(lock, fcntl.LOCK_EX)
        for items in _alone:
            _run(items)
    return True


def _taken(folder: Path) -> Iterator[list[str]]:
    for number, names in enumerate(json.loads((folder / "hands").read_text())):
        try:
            (folder / f"{number}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        yield names


def _collect(session: pytest.Session, names: list[str]) -> list[pytest.Item]:
    """Return the tests of these files, or with these names, as the command line chooses them."""
    root, hook = session.config.rootpath, session.config.hook
    files = dict.fromkeys(root / name.partition("::")[0] for name in names)
    whole = {root / name for name in names}
    items = [item for file in files for item in session.genitems(_modules[file])]
    session.items = [item for item in items if item.path in whole or item.nodeid in names]
    hook.pytest_collection_modifyitems(session=session, config=session.config, items=session.items)
    hook.pytest_collection_finish(session=session)
    session.testscollected += len(session.items)
    return session.items


def _run(items: list[pytest.Item]) -> None:
    """Run tests; what fixtures of the session hold, such as a cluster, ends with the last one."""
    for item, following in zip(items, [*items[1:], None], strict=False):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write seconds by test, counts by outcome, and what failed."""
    _ended_with.append(exitstatus)
    stats = session.config.pluginmanager.get_plugin("terminalreporter").stats  # type: ignore[union-attr]
    seconds: dict[str, float] = {}
    for report in (report for reports in stats.values() for report in reports):
        if type(report) is pytest.TestReport:  # a test's seconds include those of its subtests
            seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    counts = {kind: len(stats.get(kind, ())) for kind in ("passed", "skipped")}
    bad = [report for kind in ("failed", "error", "subtests failed") for report in stats.get(kind, ())]
    failed = list(dict.fromkeys(report.nodeid for report in bad))
    results = {"seconds": seconds, "counts": counts, "failed": failed}
    (session.config.getoption("take_from") / f"{os.getpid()}.json").write_text(json.dumps(results))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End although a thread of a failed test may go on for ever."""
    if _ended_with == [pytest.ExitCode.TESTS_FAILED]:
        sys.stdout.flush()
        os._exit(pytest.ExitCode.TESTS_FAILED)


if __name__ == "__main__":
    sys.exit(main())
