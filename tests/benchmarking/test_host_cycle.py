"""The benchmark of the host's part of a step: it runs, every step is launched ahead, and its parts are told."""

import pytest

pytest.importorskip("triton")

from benchmarks.engine.host_cycle import RANDOM, measure


def test_steps_of_stand_ins_are_timed_in_parts() -> None:
    row = measure(3, 32, RANDOM, 4)
    assert 0.0 < row["planning of attention"] <= row["batch, with planning"] <= row["engine"] < row["cycle_ms"]
