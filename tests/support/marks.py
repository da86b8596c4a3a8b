"""Marks that many tests set, and how much of what is random they try."""

import os

import pytest

_ALL_HISTORIES = "ALIGNEDSERVE_ALL_HISTORIES"


def slow(*values: object) -> list[pytest.ParameterSet]:
    """Mark parameters that only the slow tests run with; the default ones keep a handful of others."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def many(count: int) -> int:
    """Return how many random histories a slow test plays: a tenth of `count`; all if ALIGNEDSERVE_ALL_HISTORIES is 1.

    The default tests find every deliberate fault (tests/faults) with far fewer; more histories are for faults that
    nobody has thought of, and `make test-histories` plays all.
    """
    return count if os.environ.get(_ALL_HISTORIES) == "1" else max(1, count // 10)
