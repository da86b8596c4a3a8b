"""Leasing lines of a batch."""

from collections.abc import Iterable

import pytest

from alignedserve.batches.line_tracker import LineTracker


def test_every_line_is_leased_once() -> None:
    book = LineTracker(3, settled=[1], max_attempts=2)
    assert [book.lease(0.0), book.lease(0.0), book.lease(0.0)] == [0, 2, None]
    assert (book.num_leased, book.num_left, book.next_due_s(0.0)) == (2, 2, None)


def test_a_settled_line_is_done() -> None:
    book = LineTracker(1, max_attempts=2)
    assert book.lease(0.0) == 0
    book.settle(0)
    assert (book.is_done, book.num_leased, book.is_settled(0), list(book.unsettled())) == (True, 0, True, [])
    with pytest.raises(AssertionError):
        book.settle(0)


def test_what_was_not_taken_comes_back_after_its_pause_and_first() -> None:
    book = LineTracker(3, max_attempts=2)
    assert book.lease(0.0) == 0
    book.postpone(0, 0.0, 5.0)
    assert book.lease(4.9) == 1
    assert book.lease(5.0) == 0
    assert book.lease(5.0) == 2


def test_what_breaks_is_tried_a_few_times_with_growing_pauses() -> None:
    book = LineTracker(1, max_attempts=3)
    assert book.lease(0.0) == 0
    assert book.broke(0, 0.0)
    assert (book.lease(0.4), book.lease(0.5)) == (None, 0)
    assert book.broke(0, 0.5)
    assert (book.next_due_s(0.5), book.lease(1.5)) == (1.0, 0)
    assert not book.broke(0, 1.5)
    assert (book.num_leased, book.lease(100.0)) == (1, None)  # until its record is written
    book.settle(0)
    assert book.is_done


def test_not_being_taken_counts_no_try() -> None:
    book = LineTracker(1, max_attempts=2)
    for second in range(10):
        assert book.lease(float(second)) == 0
        book.postpone(0, float(second), 1.0)
    assert book.lease(10.0) == 0
    assert book.broke(0, 10.0)


@pytest.mark.parametrize("settled", [range(3), (1, 2)])
def test_what_was_settled_before_a_crash_is_never_due(settled: Iterable[int]) -> None:
    """A successor's book: whatever it says is due, it can lease."""
    book = LineTracker(3, settled, max_attempts=2)
    while book.next_due_s(0.0) == 0.0:
        assert book.lease(0.0) is not None
    assert book.next_due_s(0.0) is None
