"""ALISE's experiment in little."""

import pytest

from experiments.alise import LATENCY, AliseLoad
from experiments.common import over_seeds, run


@pytest.mark.slow
def test_the_shortest_first_keeps_latency_low_where_the_first_come_does_not() -> None:
    load = AliseLoad("opt-13b", "sharegpt", 2.5, 60.0)
    cases = [load.case("figure 6", name, 1) for name in ("vLLM", "ALISE", "aligned_slo")]
    fcfs, alise, union = over_seeds(run(cases, processes=1), ("policy",))
    assert max(alise[LATENCY], union[LATENCY]) < 0.7 * fcfs[LATENCY]
