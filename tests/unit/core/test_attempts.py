"""Attempt numbers: epochs, and steps within one."""

from alignedserve.core.lifecycle import (
    STEPS_PER_EPOCH,
    beyond_unreported,
    epoch_end,
    is_report_due,
    is_same_epoch,
    next_epoch,
    next_step,
)


def test_an_epoch_begins_above_the_latest() -> None:
    first = next_epoch(0, now=0.0)
    assert first == STEPS_PER_EPOCH
    assert next_epoch(first, now=0.0) == 2 * STEPS_PER_EPOCH
    assert next_epoch(epoch_end(first), now=0.0) == 2 * STEPS_PER_EPOCH


def test_an_epoch_is_at_least_the_time_in_milliseconds() -> None:
    assert next_epoch(0, now=12.5) == 12_500 * STEPS_PER_EPOCH
    assert next_epoch(12_500 * STEPS_PER_EPOCH, now=12.5) == 12_501 * STEPS_PER_EPOCH


def test_a_router_that_begins_later_gives_larger_numbers() -> None:
    before = next_epoch(next_epoch(0, now=5.0), now=5.0)
    assert next_epoch(0, now=5.002) > before


def test_as_in_the_docstring_the_pool_takes_it_with_one_step_and_a_decode_worker_with_another() -> None:
    given_out = 3 * STEPS_PER_EPOCH
    assert next_step(given_out) == given_out + 1
    assert next_step(next_step(given_out)) == given_out + 2


def test_a_step_stays_within_its_epoch() -> None:
    given_out = next_epoch(0, now=0.0)
    assert is_same_epoch(given_out, next_step(given_out))
    assert not is_same_epoch(given_out, next_epoch(given_out, now=0.0))


def test_the_end_of_an_epoch_is_behind_all_its_steps_and_before_the_next() -> None:
    given_out = next_epoch(0, now=0.0)
    end = epoch_end(next_step(given_out))
    assert end == epoch_end(given_out) == next_epoch(given_out, now=0.0) - 1
    assert is_same_epoch(given_out, end)


def test_a_year_of_milliseconds_fits_into_a_message() -> None:
    assert epoch_end(next_epoch(0, now=365 * 86_400.0)) <= 1 << 53


def test_what_a_router_gave_out_since_its_last_report_is_below_the_next_ones_numbers() -> None:
    reported, latest = 0, 0
    for now in (1e6, 1e6, 1e6 + 500, 1e6 + 2000):
        latest = next_epoch(latest, now)
        reported = latest if is_report_due(latest, reported) else reported
        assert latest < beyond_unreported(reported)
