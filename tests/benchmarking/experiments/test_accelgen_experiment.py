"""AccelGen's experiment in little: that it runs, and that its main findings are there."""

from dataclasses import replace

import pytest

from experiments.accelgen import ABLATIONS, OPT_13B, accelgen_case, cases_of, figures
from lab.sim.simulation import Simulation
from lab.workload.requests import Workload


@pytest.mark.slow
def test_in_overload_the_union_serves_more_than_accelgen_and_first_come_first_served() -> None:
    rows = {
        row["policy"]: row
        for row in figures(cases_of(is_quick=True, setting=replace(OPT_13B, window_s=12.0)), processes=1)
    }
    assert rows.keys() == {"sarathi", "accelgen", "aligned_slo", *ABLATIONS}
    union = rows["aligned_slo"]
    assert union["all.requests_per_s"] > 2 * max(rows[name]["all.requests_per_s"] for name in ("sarathi", "accelgen"))
    assert union["all.token_attainment"] > 0.9


def test_a_case_has_the_papers_memory_and_first_token_objectives_from_the_prompt() -> None:
    labelled = accelgen_case(replace(OPT_13B, window_s=4.0), "accelgen", 1, {})
    config, workload = labelled.case.config, labelled.case.workload
    assert config.decode_memory.num_blocks == 12 * (1 << 30) // (32 * 819_200)
    assert isinstance(workload, Workload)
    online = [one for one in workload.requests if one.slo.ttft_s is not None]
    assert {one.class_name for one in online} == {"alpaca", "sharegpt", "book"}
    assert all(0.009 < one.slo.ttft_s < 1.5 for one in online if one.slo.ttft_s is not None)
    assert Simulation(config, workload).run().classes["all"].num_sent == len(workload.requests)
