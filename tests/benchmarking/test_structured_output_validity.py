"""Answers under random JSON schemas are valid; benchmarks/structured_output/validity.py does the same at length."""

import pytest

from benchmarks.structured_output.validity import generated, walked


def test_answers_to_random_schemas_are_valid() -> None:
    counts = walked(range(60), 2)
    assert counts.accepted > 45
    assert counts.valid > 80
    assert counts.invalid == []


@pytest.mark.slow
def test_answers_to_many_random_schemas_are_valid() -> None:
    counts = walked(range(1000, 1800), 2)
    assert counts.valid > 1200
    assert counts.invalid == []


@pytest.mark.slow
def test_answers_of_a_model_to_random_schemas_are_valid() -> None:
    counts = generated(range(30))
    assert counts.valid > 10
    assert counts.invalid == []
