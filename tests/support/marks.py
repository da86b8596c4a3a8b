"""Marks that many tests set."""

import pytest


def slow(*values: object) -> list[pytest.ParameterSet]:
    """Mark parameters that only the slow tests run with; the default ones keep a handful of others."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
