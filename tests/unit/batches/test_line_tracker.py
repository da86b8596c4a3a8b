"""Leasing lines of a batch."""

from collections.abc import Iterable

import pytest

from alignedserve.batches.line_tracker import LineTracker
from tests.support.marks import each


def test_every_line_is_leased_once() -> None:
    tracker = LineTracker(3, settled=[1], max_attempts=2)
    assert [tracker.lease(0.0), tracker.lease(0.0), tracker.lease(0.0)] == [0, 2, None]
    assert (tracker.num_leased, tracker.num_left, tracker.lease(1e9)) == (2, 2, None)


def test_a_settled_line_is_done() -> None:
    tracker = LineTracker(1, max_attempts=2)
    assert tracker.lease(0.0) == 0
    tracker.settle(0)
    assert (tracker.is_done, tracker.num_leased, list(tracker.unsettled())) == (True, 0, [])
    with pytest.raises(AssertionError):
        tracker.settle(0)


def test_what_was_not_taken_comes_back_after_its_pause_and_first() -> None:
    tracker = LineTracker(3, max_attempts=2)
    assert tracker.lease(0.0) == 0
    tracker.postpone(0, 0.0, 5.0)
    assert tracker.lease(4.9) == 1
    assert tracker.lease(5.0) == 0
    assert tracker.lease(5.0) == 2


def test_what_breaks_is_tried_a_few_times_with_growing_pauses() -> None:
    tracker = LineTracker(1, max_attempts=3)
    assert tracker.lease(0.0) == 0
    assert tracker.retry(0, 0.0)
    assert (tracker.lease(0.4), tracker.lease(0.5)) == (None, 0)
    assert tracker.retry(0, 0.5)
    assert (tracker.lease(1.4), tracker.lease(1.5)) == (None, 0)
    assert not tracker.retry(0, 1.5)
    assert (tracker.num_leased, tracker.lease(100.0)) == (1, None)  # until its record is written
    tracker.settle(0)
    assert tracker.is_done


def test_not_being_taken_counts_no_try() -> None:
    tracker = LineTracker(1, max_attempts=2)
    for second in range(10):
        assert tracker.lease(float(second)) == 0
        tracker.postpone(0, float(second), 1.0)
    assert tracker.lease(10.0) == 0
    assert tracker.retry(0, 10.0)


@each("settled", [range(3), (1, 2)])
def test_what_was_settled_before_a_crash_is_never_due(settled: Iterable[int]) -> None:
    tracker = LineTracker(3, settled, max_attempts=2)
    untouched = [line for line in range(3) if line not in settled]
    assert [tracker.lease(0.0) for _ in range(4)] == untouched + [None] * (4 - len(untouched))
