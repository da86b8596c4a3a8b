"""The experiment on unseen traces: what is compared with what, and a point of it in little."""

import pytest

from experiments import unseen
from experiments.common import run
from lab.sim.sweep import WorkloadLine


def _row(policy: str, held: float, gap_s: float) -> dict[str, str | float]:
    figures = {"rt.attainment": held, "rt.goodput_per_s": held, "rt.tbt_s.p99": gap_s, "be.tokens_per_s": 5.0}
    return {"part": unseen.MIX, "trace": "arxiv", "rate": 1.0, "policy": policy, "seed": 1, **figures}


def test_the_union_is_compared_with_the_best_of_the_others_by_each_figure() -> None:
    rows = [_row("aligned_slo", 0.9, 0.1), _row("fcfs", 0.5, 0.2), _row("bros", 0.8, 0.05)]
    found = {row["figure"]: row for row in unseen.verdicts(rows)}
    assert (
        found["rt.attainment"] | {"union": 0.9, "best": 0.8, "of": "bros", "is_worse": False} == found["rt.attainment"]
    )
    assert (found["rt.tbt_s.p99"]["of"], found["rt.tbt_s.p99"]["is_worse"]) == ("bros", True)
    assert not found["be.tokens_per_s"]["is_worse"]
    assert unseen.verdicts(rows[1:]) == []


def test_every_workload_is_built_of_what_ships_and_seeds_are_other_windows() -> None:
    first, second = (
        [case.case.workload for case in unseen.mixed(seed) if case.labels["policy"] == "fcfs"] for seed in (1, 2)
    )
    assert len(first) == 2 * len(unseen.TRACES)
    for one, other in zip(first, second, strict=True):
        assert isinstance(one, WorkloadLine)
        assert isinstance(other, WorkloadLine)
        built = [workload.build() for workload in (one, other)]
        lengths = [[request.prompt_len for request in workload.requests] for workload in built]
        assert all(lengths)
        assert lengths[0] != lengths[1]
    assert {case.labels["policy"] for case in unseen.separate(1)} == {"distserve", "aligned", "aligned_slo"}


@pytest.mark.slow
def test_code_completion_beside_summaries_in_little() -> None:
    rows = {row["policy"]: row for row in run(unseen.parts_of(is_quick=True)[0], processes=1)}
    union = rows["aligned_slo"]
    assert union["rt.attainment"] >= max(rows[name]["rt.attainment"] for name in ("sarathi", "bros"))
    assert union["be.tokens_per_s"] > 0
