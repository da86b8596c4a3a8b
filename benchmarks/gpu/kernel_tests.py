"""The kernels' tests on a GPU, and beside them those marked gpu, in processes of their own until the time is over.

Neither takes this project's settings for pytest, whose plugins may not be here. With pytest-xdist the kernels' tests
run in several processes, as most of their time goes to compilers.
"""

import importlib.util
import os
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.gpu_check.processes import run_part

KERNEL_TESTS = "tests/gpu_kernels"
# Those marked gpu, by what they are of; each in a process of its own, which may crash without the others.
MARKED_TESTS = {
    "transfers": ("tests/contract/test_kv_transfer.py", "tests/contract/test_refused_fetches.py"),
    "streams": ("tests/property/test_engine_histories.py",),
    "workers": ("tests/components/test_prefetch_path.py",),
}
_REPOSITORY = Path(__file__).parent.parent.parent
_OF_ALL_TESTS = "hypothesis"  # which tests/conftest.py loads
_ASYNCIO = "pytest_asyncio"
_MOST_PROCESSES = 8
_FAILED, _NOTHING_COLLECTED = "ended with 1", "ended with 5"  # by exit codes of pytest
_KEPT_OF_LOG = 40_000  # characters from the end: what failed, and why

_RESULTS = "PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS"
_ONE_PROCESS = re.compile(rf"^(\S+::.*) ({_RESULTS})\b", re.MULTILINE)
_SEVERAL = re.compile(rf"^\[gw\d+\] \[ *\d+%\] ({_RESULTS}) (\S+::.*)$", re.MULTILINE)
_UNREAD = re.compile(r"^_+ ERROR collecting (\S+) _+$(.*?)(?=^[_=]{3})", re.MULTILINE | re.DOTALL)
_MISSING = re.compile(r"^E +ModuleNotFoundError: No module named '([^']+)'", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SeenTests:
    """Results of single tests, read from a log of `pytest -v` that may end anywhere."""

    counts: dict[str, int]  # by result
    failed: list[str]  # tests, and files that cannot be read
    left_out: list[str]  # files that need a package which is not here


def read_log(log: str) -> SeenTests:
    """Count tests by result; name those that failed, and what was left out."""
    seen = _ONE_PROCESS.findall(log) + [(name, what) for what, name in _SEVERAL.findall(log)]
    counts: dict[str, int] = {}
    for _, what in seen:
        counts[what.lower()] = counts.get(what.lower(), 0) + 1
    failed, left_out = [name.strip() for name, what in seen if what in ("FAILED", "ERROR")], []
    for file, why in dict(_UNREAD.findall(log)).items():
        missing = _MISSING.findall(why)
        if missing:
            left_out.append(f"{file}: {missing[-1]} is not installed")
        else:
            failed.append(file)
    return SeenTests(counts, failed, left_out)


def run_tests(limit_s: float) -> dict[str, Any]:
    import pytest

    has_all = _is_here(_OF_ALL_TESTS)
    settings = ["-c", os.devnull, f"--rootdir={_REPOSITORY}", "--import-mode=importlib", "-p", "no:cacheprovider"]
    settings += [f"--confcutdir={_path('tests' if has_all else KERNEL_TESTS)}", "-v", "--tb=short"]
    settings += ["-W", "ignore::pytest.PytestUnknownMarkWarning", "--continue-on-collection-errors"]
    runs = {"the kernels' tests": [*settings, *_kernel_tests()]}
    missing = [name for name in (_OF_ALL_TESTS, _ASYNCIO) if not _is_here(name)]
    if not missing:
        marked = [*settings, "-o", "asyncio_mode=auto", "-m", "gpu"]
        runs |= {f"tests of {name}": [*marked, *map(_path, files)] for name, files in MARKED_TESTS.items()}
    figures: dict[str, Any] = {"pytest": pytest.__version__, "counts": {}, "failed": [], "failures": [], "left_out": []}
    figures["left_out"] += [f"tests marked gpu: {name} is not installed" for name in missing]
    with ThreadPoolExecutor(len(runs)) as threads:
        ended = list(threads.map(lambda options: _run_pytest(options, limit_s), runs.values()))
    logs = [_noted(figures, name, *one) for name, one in zip(runs, ended, strict=True)]
    return figures | {"log": [line for log in logs for line in log[-_KEPT_OF_LOG:].splitlines()]}


def _kernel_tests() -> list[str]:
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1)
    several = ["-n", str(processes)] if processes > 1 and _is_here("xdist") else []
    return [*several, _path(KERNEL_TESTS), f"--ignore={_path(KERNEL_TESTS)}/test_compiling.py"]


def _run_pytest(options: list[str], limit_s: float) -> tuple[str | None, str]:
    paths = [str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        return run_part([sys.executable, "-m", "pytest", *options], limit_s, Path(folder) / "log", env)


def _noted(figures: dict[str, Any], name: str, problem: str | None, log: str) -> str:
    print(log[-_KEPT_OF_LOG:], flush=True)
    found = read_log(log)
    for what, count in found.counts.items():
        figures["counts"][what] = figures["counts"].get(what, 0) + count
    figures["failed"] += found.failed
    figures["left_out"] += found.left_out
    failures = [f"{name}: {len(found.failed)} failed"] if found.failed else []
    if problem is not None and problem.startswith("ended after"):
        figures["left_out"].append(f"{name} beyond {sum(found.counts.values())}: the time was over")
    elif problem not in (None, _NOTHING_COLLECTED) and not failures and (problem != _FAILED or not found.left_out):
        failures.append(f"{name}: pytest {problem}")
    figures["failures"] += failures
    return log if failures else ""


def _path(name: str) -> str:
    return str(_REPOSITORY / name)


def _is_here(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
