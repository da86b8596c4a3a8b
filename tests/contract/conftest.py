"""Every implementation of KVTransfer, with a sender and a receiver."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.harnesses.transfer import ELSEWHERE, IN_SLOW_TESTS, MEDIA, NUM_DEVICES, Setup, filled, layout_of


def cases() -> Iterator[object]:
    for name in MEDIA:
        yield pytest.param((name, "float32"), id=name, marks=[pytest.mark.slow] if name in IN_SLOW_TESTS else [])
    yield pytest.param(("shm pool", "bfloat16"), id="shm pool, bfloat16")
    for name in ELSEWHERE:
        marks = [pytest.mark.gpu] if name in NUM_DEVICES else [pytest.mark.slow]
        yield pytest.param((name, "bfloat16"), id=name, marks=marks)


@pytest.fixture(params=cases())
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    name, dtype = request.param
    if torch.cuda.device_count() < NUM_DEVICES.get(name, 0):
        pytest.skip(f"needs {NUM_DEVICES[name]} CUDA devices")
    layout = layout_of(dtype)
    medium = (MEDIA | ELSEWHERE)[name](tmp_path, layout)
    yield Setup(medium, layout, filled(layout, 1, medium.device), filled(layout, 2, medium.device))
    medium.close()


@pytest.fixture
def pool(setup: Setup) -> Setup:
    """Setups in which the owner stamps the blocks."""
    if setup.medium.writer_stamps:
        pytest.skip("in a candidate buffer the writer stamps the blocks")
    return setup


@pytest.fixture
def buffer(setup: Setup) -> Setup:
    """Setups in which the writer stamps the blocks."""
    if not setup.medium.writer_stamps:
        pytest.skip("in the pool's arena the pool stamps the blocks")
    return setup
