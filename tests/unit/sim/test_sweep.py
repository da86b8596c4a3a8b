"""Cases in, results out, whatever happens to one of them."""

import os
from dataclasses import dataclass

import pytest
from typing_extensions import override

from lab.sim.sweep import Case, CaseProgress, WorkloadLine, run_cases
from lab.workload.requests import Workload
from tests.harnesses.simulation import colocated, disaggregated, mixed_workload, timed, workload_of
from tests.support.marks import slow

LINE = WorkloadLine("prompt=uniform(10,200), output=uniform(2,20), rate=20, ttft=1, tpot=0.2", seed=3, num_requests=30)
CASES = [
    Case("fcfs", colocated(), LINE),
    Case("sarathi", colocated(policy="sarathi"), LINE),
    Case("separate", disaggregated(), mixed_workload(20, 10.0)),
]
NEVER_FITS = Case("never", colocated(), workload_of(timed(prompt_len=100_000)))


@dataclass(frozen=True, slots=True)
class Broken(WorkloadLine):
    """A workload that breaks what builds it."""

    exit_code: int | None = None

    @override
    def build(self) -> Workload:
        if self.exit_code is not None:
            os._exit(self.exit_code)
        raise ZeroDivisionError("a bug")


def test_results_come_in_the_order_of_the_cases_and_are_the_same_in_any_number_of_processes() -> None:
    here, elsewhere = run_cases(CASES), run_cases(CASES, processes=2)
    assert [one.case for one in elsewhere] == CASES
    assert [one.error for one in here] == [None] * 3
    assert [one.result for one in here] == [one.result for one in elsewhere]


@pytest.mark.parametrize("processes", [1, *slow(2)])
def test_a_case_that_fails_is_a_result_and_the_others_go_on(processes: int) -> None:
    never, broken, fine = run_cases(
        [NEVER_FITS, Case("broken", colocated(), Broken("")), CASES[0]], processes=processes
    )
    assert never.error is not None
    assert "100003 tokens" in never.error
    assert (never.result, never.traceback) == (None, None)
    assert broken.error == "ZeroDivisionError: a bug"
    assert broken.traceback is not None
    assert "in build" in broken.traceback
    assert fine.result is not None


@pytest.mark.slow
def test_a_process_that_dies_takes_only_its_own_case_along() -> None:
    dying = [Case(f"dying {number}", colocated(), Broken("", exit_code=number)) for number in (7, 8)]
    results = run_cases([*dying, *CASES[:2]], processes=2)
    assert [one.error for one in results] == [
        "its process ended (exit code 7)",
        "its process ended (exit code 8)",
        None,
        None,
    ]


@pytest.mark.parametrize("processes", [1, *slow(2)])
def test_progress_ends_with_every_case(processes: int) -> None:
    seen: list[CaseProgress] = []
    run_cases([*CASES, NEVER_FITS], processes=processes, progress=seen.append)
    over = [one for one in seen if one.is_done]
    assert sorted(one.name for one in over) == ["fcfs", "never", "sarathi", "separate"]
    assert {one.name: one.num_ended for one in over} == {"fcfs": 30, "never": 0, "separate": 20, "sarathi": 30}
    assert all(one.simulated_s > 0 for one in over if one.name != "never")
