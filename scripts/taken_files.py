"""A plugin of pytest for scripts/run_tests.py: a process takes its files from a list that several processes share.

A file is imported once it is taken. Tests marked `alone` come last, while no other process runs any.
"""

import fcntl
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import collect_one_node

LIST = "files.json"  # lists of files, or of single tests; one process takes a whole list
OPTION = "--take-from"

_EXIT_STATUS = pytest.StashKey[int]()
_modules: dict[Path, pytest.Module] = {}
_alone: list[list[pytest.Item]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the folder of the list, which gets the results as well."""
    parser.addoption(OPTION, dest="take_from", type=Path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> bool:
    """Find files, and import none yet."""
    nodes = list(session.perform_collect(genitems=False))
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


def _collect(session: pytest.Session, names: list[str]) -> list[pytest.Item]:
    """Return the tests of these files, or with these names, as the command line chooses them."""
    root = session.config.rootpath
    paths = dict.fromkeys(root / name.partition("::")[0] for name in names)
    whole = {root / name for name in names}
    items = [item for path in paths for item in session.genitems(_modules[path])]
    session.items = [item for item in items if item.path in whole or item.nodeid in names]
    session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=session.items)
    session.config.hook.pytest_collection_finish(session=session)
    session.testscollected += len(session.items)
    return session.items


def _taken(folder: Path) -> Iterator[list[str]]:
    for number, names in enumerate(json.loads((folder / LIST).read_text())):
        try:
            (folder / f"{number}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        yield names


def _run(items: list[pytest.Item]) -> None:
    """Run tests; what fixtures of the session hold, such as a cluster, ends with the last one."""
    for item, following in zip(items, [*items[1:], None], strict=False):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if item.session.shouldstop:
            raise item.session.Interrupted(item.session.shouldstop)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End although a thread of a failed test may go on for ever."""
    sys.stdout.flush()
    if config.stash.get(_EXIT_STATUS, 0) == pytest.ExitCode.TESTS_FAILED:
        os._exit(pytest.ExitCode.TESTS_FAILED)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write seconds by test, counts by outcome, and what failed."""
    session.config.stash[_EXIT_STATUS] = exitstatus
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    seconds: Counter[str] = Counter()
    for report in (report for reports in reporter.stats.values() for report in reports):
        if type(report) is pytest.TestReport:  # a test's seconds include those of its subtests
            seconds[report.nodeid] += report.duration  # type: ignore[assignment]  # a counter of seconds
    bad = [report for kind in ("failed", "error", "subtests failed") for report in reporter.stats.get(kind, ())]
    results = {
        "seconds": seconds,
        "counts": {kind: len(reporter.stats.get(kind, ())) for kind in ("passed", "skipped")},
        "failed": list(dict.fromkeys(report.nodeid for report in bad)),
    }
    (session.config.getoption("take_from") / f"{os.getpid()}.json").write_text(json.dumps(results))
