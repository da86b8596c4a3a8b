"""Requests on GPUs generate what they generate on a CPU, whatever streams do, whatever is freed, captured or killed.

`python -m tests.harnesses.cuda_schedules --count 10000` runs as many as one likes; docs/testing.md has its figures.
"""

import pytest

from tests.harnesses.cuda_schedules import run_schedules
from tests.support.marks import many, slow


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, *slow(many(1000))])
def test_answers_are_the_cpu_engine_s(count: int) -> None:
    wrong, seen = run_schedules(0, count)
    assert not wrong
    assert seen["tokens"] > 5 * count
    assert seen["steps within others"] >= count // 4
    assert min(seen["captures"], seen["replays"], seen["frees"], seen["copies"]) > count
