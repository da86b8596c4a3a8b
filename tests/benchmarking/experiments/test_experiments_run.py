"""Each experiment in little: that it runs, and that its main finding is there."""

from dataclasses import replace

import pytest

from experiments import alignedserve, bros
from experiments.common import over_seeds, pick, run


@pytest.mark.slow
def test_bros_holds_first_tokens_where_first_come_first_served_does_not() -> None:
    cases = [case for case in bros.headline(20.0, (1,)) if case.labels["policy"] in ("fcfs", "bros", "aligned_slo")]
    fcfs, ours, union = over_seeds(run(cases, processes=1), ("policy",))
    assert fcfs["rt.ttft_attainment"] < 0.6 < 0.95 < min(ours["rt.ttft_attainment"], union["rt.ttft_attainment"])
    assert ours["rt.normalized_s.mean"] < fcfs["rt.normalized_s.mean"]


@pytest.mark.slow
def test_alignment_pays_where_the_longest_is_a_straggler_and_not_where_it_is_not() -> None:
    loads = [replace(alignedserve.HEADLINE, kernel=kernel, num_requests=300) for kernel in alignedserve.KERNELS]
    cases = [load.case("little", system, 1) for load in loads for system in ("aligned", "aligned_slo", "distserve")]
    rows = run(cases, processes=1, also=alignedserve.further_figures)
    straggler, balanced = (
        {row["system"]: row["all.tokens_per_s"] for row in pick(rows, kernel=kernel.value)}
        for kernel in alignedserve.KERNELS
    )
    assert min(straggler["aligned"], straggler["aligned_slo"]) > 1.2 * straggler["distserve"]
    assert max(balanced["aligned"], balanced["aligned_slo"]) < 1.05 * balanced["distserve"]
