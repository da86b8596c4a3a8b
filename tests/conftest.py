"""Settings and fixtures of every test, and how tests are spread over processes."""

import atexit
import functools
import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from alignedserve.config.environment import limit_thread_spinning

# Compiled files are kept, as by `make test`: the processes that tests start would compile every module anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Without a GPU the kernels for it run in Triton's interpreter, which reads its switch when a kernel is defined.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# As in a cluster, whose processes share the cores with others.
limit_thread_spinning()

_TAKES_CLUSTER = re.compile(r"def test_\w+\([^)]*\b(?:separate_)?cluster: Serving")
_MAX_PROCESSES = 4  # a gigabyte each

# How long an example or its drawing takes says how busy the machine is, not whether the code is right.
settings.register_profile("alignedserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("alignedserve")


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Keeps the tests of a file in one process, and with them those of files that use the same cluster or hosts.

    Slow tests are handed out one by one where nothing is made for a whole file: no process ends long after the others.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith("tests/cluster/"):
            return _cluster_scope(file)
        is_slow = self.config.option.markexpr.startswith("slow")
        return nodeid if is_slow and not _makes_for_all(file) else file


@functools.cache
def _makes_for_all(file: str) -> bool:
    """Return whether a fixture of this file serves more than one test."""
    return 'scope="module"' in Path(file).read_text(encoding="utf-8")


@functools.cache
def _cluster_scope(file: str) -> str:
    """Return what the tests of this file share: the shared clusters, the one set of hosts, or nothing with others."""
    source = Path(file).read_text(encoding="utf-8")
    if "namespace_hosts" in source or "cluster_demo" in source:
        return "hosts of namespaces"
    return "shared clusters" if _TAKES_CLUSTER.search(source) else file


def pytest_configure() -> None:
    """Collect no garbage while modules are imported: nothing of theirs is."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what is there now, a million objects that stay, out of every later collection but that of the very end.

    Native modules would report them as leaked; and pytest's own collections, five at its end, need not look at them.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Collect no garbage while a failure is written down, or its name may be lost with the whole run.

    A finalizer that fails is written down within it, and Python before 3.11.8 cannot parse source within such parsing:
    "AST constructor recursion depth mismatch" (CPython issue 106905).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    """Hand out files in the order of their collection: the cluster, which mostly waits, comes first."""
    return FileScheduling(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return a process per core for a whole run, none for the files and folders that a command names."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)


@pytest.fixture(autouse=True)
def _torch_as_at_the_start() -> None:
    """Each test draws the same tensors alone and after others, on one thread.

    Tiny products gain nothing from a second thread; an engine takes all cores, for whatever follows as well.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
        sys.modules["torch"].default_generator.manual_seed(0)
