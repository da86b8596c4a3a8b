"""Durations of past iterations: the moving average and the maximum of a sliding window; and chunks within a budget."""

import pytest

from alignedserve.costmodel.model import chunk_within
from alignedserve.costmodel.work import IterationWork
from alignedserve.scheduling.policy import IterationHistory
from tests.harnesses.scheduling import EasyCosts
from tests.support.marks import each


def _history(*durations_s: float) -> IterationHistory:
    history = IterationHistory()
    for duration_s in durations_s:
        history.note(duration_s)
    return history


def test_nothing_has_happened() -> None:
    assert _history() == IterationHistory(0, 0.0, 0.0, 0.0)


def test_the_first_iteration_is_the_average() -> None:
    history = _history(0.5)
    assert (history.num_iterations, history.last_s, history.mean_s, history.max_s) == (1, 0.5, 0.5, 0.5)


def test_a_tenth_of_the_average_is_the_latest() -> None:
    history = _history(0.5, 1.5, 0.1)
    assert history.mean_s == pytest.approx(0.9 * 0.6 + 0.1 * 0.1)
    assert (history.last_s, history.max_s) == (0.1, 1.5)


@each(("num_after", "max_s"), [(63, 9.0), (64, 9.0), (126, 9.0), (127, 9.0), (128, 1.0)])
def test_a_maximum_is_forgotten_after_two_windows(num_after: int, max_s: float) -> None:
    assert _history(9.0, *[1.0] * num_after).max_s == max_s


def test_the_maximum_covers_64_iterations_at_least() -> None:
    durations = [1.0] * 63 + [9.0]  # the last of a window
    assert _history(*durations, *[1.0] * 64).max_s == 9.0
    assert _history(*durations, *[1.0] * 65).max_s == 1.0


@each(
    ("budget_s", "at_most", "step", "chunk"),
    [
        (0.110, 100, 1, 100),  # 10 ms and one for each token: exactly
        (0.1095, 100, 1, 99),
        (0.0115, 100, 1, 1),
        (0.0105, 100, 1, 0),
        (0.001, 100, 1, 0),
        (0.110, 0, 1, 0),
        (0.090, 100, 32, 64),
        (0.110, 100, 32, 100),  # all of it, though no multiple
        (0.041, 100, 32, 0),
        (1.0, 5, 32, 5),
    ],
)
def test_the_chunk_that_a_budget_leaves_room_for(budget_s: float, at_most: int, step: int, chunk: int) -> None:
    costs = EasyCosts(context_s=0.0)
    work = IterationWork()
    assert chunk_within(costs, work, num_cached=0, at_most=at_most, budget_s=budget_s, step=step) == chunk
    assert work == IterationWork()


def test_the_chunk_beside_what_is_packed() -> None:
    work = IterationWork()
    work.add_decodes(20, 2000, 100)  # 10 + 20 + 20 ms
    assert chunk_within(EasyCosts(), work, num_cached=0, at_most=100, budget_s=0.0805) == 30
