"""What holds for every test."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from alignedserve.config.environment import limit_thread_spinning

# Without a GPU the kernels for it run in Triton's interpreter, which reads its switch when a kernel is defined.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# As in a cluster, whose processes share the cores with others.
limit_thread_spinning()

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("alignedserve", deadline=None)
settings.load_profile("alignedserve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of a served cluster come last: it would keep the machine a little busy through all that follow."""
    items.sort(key=lambda item: item.get_closest_marker("cluster") is not None)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny products gain nothing from a second thread; an engine takes all cores, for whatever follows as well."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
