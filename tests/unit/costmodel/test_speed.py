"""How fast a worker is, by its cost model."""

import pytest

from alignedserve.costmodel.model import speed_of
from tests.harnesses.scheduling import EasyCosts


def test_prompts_and_tokens_alone() -> None:
    speed = speed_of(EasyCosts(), max_tokens=4096, max_context_len=8192)
    assert speed == pytest.approx((0.010 + 0.064, 0.010 + 1.024, 0.010 + 0.001 + 0.00512, 0.010 + 0.004 + 4 * 0.00512))


def test_a_prompt_takes_as_many_iterations_as_its_chunks() -> None:
    assert speed_of(EasyCosts(), max_tokens=100, max_context_len=8192).prompt_s == pytest.approx(11 * 0.010 + 1.024)


def test_where_little_fits_the_usual_prompt_is_half_of_it() -> None:
    speed = speed_of(EasyCosts(), max_tokens=4096, max_context_len=80)
    assert speed[:3] == pytest.approx((0.050, 0.050, 0.010 + 0.001 + 0.0004))
