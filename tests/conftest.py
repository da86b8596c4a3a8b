"""Settings and fixtures of every test, and how tests are spread over processes."""

import functools
import gc
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import settings
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

_TAKES_CLUSTER = re.compile(r"def test_\w+\([^)]*\bcluster: Serving")
_MAX_PROCESSES = 4  # a gigabyte each

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("alignedserve", deadline=None)
settings.load_profile("alignedserve")


class FileScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Keeps the tests of a file in one process, and with them those of files that use the same cluster or hosts."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _cluster_scope(file) if file.startswith("tests/cluster/") else file


@functools.cache
def _cluster_scope(file: str) -> str:
    """Return what the tests of this file share: the one cluster, the one set of hosts, or nothing with others."""
    source = Path(file).read_text(encoding="utf-8")
    if "namespace_hosts" in source or "cluster_demo" in source:
        return "hosts of namespaces"
    return "shared cluster" if _TAKES_CLUSTER.search(source) else file


def pytest_configure() -> None:
    """Collect no garbage while modules are imported: nothing of theirs is."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave what is there now, a million objects that stay, out of every later collection."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Free at the end what native modules would report as leaked."""
    gc.unfreeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling:
    """Hand out files in the order of their collection: the cluster, which mostly waits, comes first."""
    return FileScheduling(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return a process per core for a whole run, none for the files and folders that a command names."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return min(len(os.sched_getaffinity(0)), _MAX_PROCESSES)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny products gain nothing from a second thread; an engine takes all cores, for whatever follows as well."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
