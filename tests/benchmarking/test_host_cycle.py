"""The benchmark of the host's part of a step: it runs, every step is launched ahead, and its parts are told."""

import pytest

pytest.importorskip("triton")

from benchmarks.engine.host_cycle import GREEDY, RANDOM, calls_of, measure


def test_steps_of_stand_ins_are_timed_in_parts() -> None:
    row = measure(3, 32, RANDOM, 4)
    assert 0.0 < row["planning of attention"] <= row["batch, with planning"] <= row["engine"] < row["cycle_ms"]


def test_a_step_makes_few_calls() -> None:
    """Four for each token; the others are as many for any number of requests."""
    assert calls_of(64, 64, GREEDY) <= 950
