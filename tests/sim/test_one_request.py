"""One request on an idle cluster takes just the sum of its parts."""

import pytest

from alignedserve.core.request import Slo
from lab.sim.simulation import Simulation
from tests.harnesses.simulation import MESSAGE_S, colocated, disaggregated, timed, workload_of

PREFILL_S = 0.010 + 0.001 * 40
SECOND_S = 0.010 + 0.001 + 0.00001 * 41  # the second token reads the prompt and the first
THIRD_S = SECOND_S + 0.00001
COPY_S = 0.001 + 3 * 0.001  # three blocks to the pool, or back


def test_disaggregated() -> None:
    result = Simulation(disaggregated(), workload_of(timed())).run().classes["all"]
    assert result.ttft_s is not None
    assert result.tbt_s is not None
    assert result.end_to_end_s is not None
    # To the router, to the worker, and to the client.
    assert result.ttft_s.distribution.max == pytest.approx(3 * MESSAGE_S + PREFILL_S)
    # ReserveBlocks, BlocksReserved, BlocksWritten, RequestPooled, FormBatch and BatchGranted, a copy in their middle
    # and one at their end.
    assert result.tbt_s.distribution.max == pytest.approx(6 * MESSAGE_S + 2 * COPY_S + SECOND_S)
    assert result.tbt_s.curve[0] == pytest.approx(THIRD_S)
    assert result.tbt_s.distribution.count == 2
    whole_s = 9 * MESSAGE_S + PREFILL_S + 2 * COPY_S + SECOND_S + THIRD_S
    assert result.end_to_end_s.distribution.max == pytest.approx(whole_s)


def test_colocated() -> None:
    result = Simulation(colocated(), workload_of(timed())).run().classes["all"]
    assert result.ttft_s is not None
    assert result.tbt_s is not None
    assert result.ttft_s.distribution.max == pytest.approx(3 * MESSAGE_S + PREFILL_S)
    assert result.tbt_s.distribution.max == pytest.approx(THIRD_S)
    assert result.tbt_s.curve[0] == pytest.approx(SECOND_S)


def test_a_prompt_that_is_longer_than_an_iteration_takes_several() -> None:
    result = Simulation(disaggregated(), workload_of(timed(prompt_len=600, output_len=1))).run().classes["all"]
    assert result.end_to_end_s is not None
    expected = 3 * MESSAGE_S + 2 * 0.010 + 0.001 * 600
    assert result.end_to_end_s.distribution.max == pytest.approx(expected)


def test_the_answer_ends_where_it_would_even_if_the_client_allows_more() -> None:
    result = Simulation(disaggregated(), workload_of(timed(output_len=5, max_tokens=50))).run()
    assert result.classes["all"].tbt_s is not None
    assert result.classes["all"].tbt_s.distribution.count == 4


def test_each_objective_is_counted_by_itself_and_latency_by_the_token() -> None:
    strict = Slo(ttft_s=0.5, tpot_s=0.010)
    result = Simulation(colocated(), workload_of(timed(slo=strict))).run().classes["all"]
    assert (result.attainment, result.ttft_attainment, result.tpot_attainment) == (0.0, 1.0, 0.0)
    assert result.token_attainment == pytest.approx(1 / 3)  # the first of three
    assert result.normalized_s is not None
    assert result.end_to_end_s is not None
    assert result.normalized_s.distribution.mean == pytest.approx(result.end_to_end_s.distribution.mean / 3)


def test_throughput_under_load_leaves_out_the_tail() -> None:
    """The first two have ended when the last is sent, two seconds after the first."""
    requests = [timed(at, output_len=2) for at in (0.0, 1.0, 2.0)]
    result = Simulation(colocated(), workload_of(*requests)).run().classes["all"]
    assert result.loaded_requests_per_s == pytest.approx(1.0)
    assert result.requests_per_s > 1.0


def test_the_slowest_gaps_may_miss_what_their_mean_holds() -> None:
    between = Slo(ttft_s=0.5, tpot_s=SECOND_S + 0.000007)  # the mean of its two gaps is below it, their p99 above
    result = Simulation(colocated(), workload_of(timed(slo=between))).run().classes["all"]
    assert (result.attainment, result.p99_attainment) == (1.0, 0.0)
