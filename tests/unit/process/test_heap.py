"""Garbage collection of a process after its start."""

import gc

import pytest

from alignedserve.process.actor_host import settle_heap


@pytest.fixture
def _collector_restored() -> object:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("_collector_restored")
def test_what_exists_is_looked_at_no_more_and_later_cycles_are_still_freed() -> None:
    settle_heap()
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold()[0] > 700
    before = len(gc.get_objects())
    cycle: list[object] = []
    cycle.append(cycle)
    assert len(gc.get_objects()) > before
    del cycle
    assert gc.collect() >= 1
