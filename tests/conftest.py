"""Settings and fixtures of every test; scripts/run_tests.py spreads tests over processes."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from alignedserve.config.environment import limit_thread_spinning
from tests.support.ports import free_port

# Compiled files are kept, as by `make test`: the processes that tests start would compile every module anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Without a GPU the kernels for it run in Triton's interpreter, which reads its switch when a kernel is defined.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Ctrl-C as at a terminal, for tests and what they start: what a shell has put into the background ignores it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# As in a cluster, whose processes share the cores with others.
limit_thread_spinning()

# How long an example or its drawing takes says how busy the machine is, not whether the code is right.
# Half of Hypothesis's examples; longer histories set their own number.
settings.register_profile("alignedserve", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("alignedserve")


SLOW_TIMEOUT_S = 120.0  # of a slow test that names none; of all others: pyproject.toml


def pytest_configure() -> None:
    """Collect no garbage while modules are imported: nothing of theirs is."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests their time."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


def pytest_collection_finish() -> None:
    """Leave what is there now, a million objects that stay, out of every later collection.

    pytest's own, five at its end, need not look at them, nor those of the interpreter's end, which took two seconds.
    """
    gc.freeze()
    gc.enable()


@atexit.register  # before all others, so that it comes last
def _keep_quiet() -> None:
    """Write nothing more to stderr if Triton is loaded, whose native module lists all its functions as leaked."""
    if "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


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


@pytest.fixture(autouse=True)
def _torch_as_at_the_start() -> None:
    """Each test draws the same tensors alone and after others, on one thread.

    Tiny products gain nothing from a second thread; an engine takes all cores, for whatever follows as well.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.fixture
def unused_tcp_port() -> int:
    """In place of pytest-asyncio's, whose port others may take before the test does."""
    return free_port()


@pytest.fixture(scope="session")
def unused_tcp_port_factory() -> Callable[[], int]:
    """Likewise, for tests that need several."""
    return free_port
