"""Whole runs: nothing is lost, nothing leaks, and the figures are what they were."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace as replace_in

from alignedserve.config.sections import PrefixCacheConfig
from alignedserve.core.errors import ConfigError
from alignedserve.core.request import RequestClass, Slo
from lab.sim.config import SimConfig, SimMechanisms
from lab.sim.result import SimulationResult
from lab.sim.simulation import Simulation
from lab.workload.requests import ClosedLoop, TimedRequest, Workload
from tests.harnesses.simulation import MESSAGE_S, colocated, disaggregated, mixed_workload, timed, workload_of
from tests.support.marks import each

CONFIGS = {
    "disaggregated": disaggregated(2, 2),
    "fcfs": disaggregated(2, 2, policy="fcfs"),
    "nodes": disaggregated(2, 2, num_pools=2),
    "short of blocks": disaggregated(2, 1, worker_blocks=40, pool_blocks=80, buffer_blocks=20),
    "without buffers": disaggregated(2, 1, worker_blocks=40, pool_blocks=60, buffer_blocks=0),
    "colocated": colocated(2),
    "chunked": colocated(2, policy="sarathi", worker_blocks=40),
    "shared blocks": colocated(2, policy="bros", worker_blocks=40, mechanisms=SimMechanisms(has_shared_blocks=True)),
    "hidden caches": colocated(2, policy="apt_serve", worker_blocks=40, mechanisms=SimMechanisms(hidden_ratio=0.5)),
    "union": colocated(2, policy="aligned_slo", worker_blocks=40),
    "pooled": colocated(2, policy="aligned_slo", worker_blocks=40, pool_blocks=200),
}
TIGHT = mixed_workload(40, 20.0, longest=80, longest_answer=200)


def run(config: SimConfig, workload: Workload) -> SimulationResult:
    return Simulation(config, workload).run()


@cache
def tight_run(name: str) -> SimulationResult:
    return run(CONFIGS[name], TIGHT)


@each("name", CONFIGS)
def test_every_request_ends_once_and_leaves_nothing_behind(name: str) -> None:
    result = tight_run(name)
    overall = result.classes["all"]
    assert overall.num_by_ending == {"completed": 40, "rejected": 0, "failed": 0, "unfinished": 0}
    assert overall.tbt_s is not None
    assert overall.tbt_s.distribution.count == sum(one.output_len - 1 for one in TIGHT.requests)
    assert (result.num_pool_blocks_used, result.num_worker_blocks_used) == (0, 0)
    assert {name: one.num_sent for name, one in result.classes.items()} == {"all": 40, "chat": 20, "documents": 20}


@each("name", CONFIGS)
def test_no_worker_works_more_than_the_time_there_is_nor_less_than_it_must(name: str) -> None:
    result = tight_run(name)
    assert all(0.0 < worker.utilisation <= 1.0 for worker in result.workers)
    computed = sum(worker.num_prompt_tokens + worker.num_decodes for worker in result.workers)
    # The last token of an answer is never computed; what was preempted is computed again.
    needed = sum(one.prompt_len + one.output_len - 1 for one in TIGHT.requests)
    assert computed >= needed
    if not result.num_preemptions:  # by a router, which does not know how far a lost prompt was
        assert computed == needed + result.num_recomputed_tokens


@each("config", [CONFIGS["disaggregated"], CONFIGS["colocated"]])
def test_a_busy_cluster_is_still_below_its_limit(config: SimConfig) -> None:
    result = run(config, mixed_workload(60, 4.0))
    assert all(worker.utilisation < 0.95 for worker in result.workers)
    assert result.classes["chat"].attainment is not None
    assert result.classes["chat"].attainment > 0.95


@each(
    ("name", "expected"),
    [
        ("disaggregated", (33.728, 0.9950, 0.6066, 0.0610, 9351)),
        ("colocated", (34.932, 0.9850, 0.5952, 0.9512, 3122)),
    ],
)
def test_figures_are_what_they_were(name: str, expected: tuple[float, ...]) -> None:
    """A change of any decision shows here: when it is meant, the figures are pinned anew."""
    result = run(CONFIGS[name], mixed_workload(200, 6.0))
    overall = result.classes["all"]
    assert overall.ttft_s is not None
    assert overall.tbt_s is not None
    measured = (
        result.duration_s,
        overall.attainment,
        overall.ttft_s.distribution.p90,
        overall.tbt_s.distribution.p99,
        result.num_decisions,
    )
    assert measured == pytest.approx(expected, abs=5e-4)


def test_memory_that_is_short_makes_evictions_and_memory_elsewhere_takes_them() -> None:
    workload = mixed_workload(150, 20.0, longest=80, longest_answer=200)
    with_buffers, without = run(CONFIGS["short of blocks"], workload), run(CONFIGS["without buffers"], workload)
    assert (with_buffers.num_evictions, without.num_evictions) == (19, 0)
    assert (with_buffers.num_preemptions, without.num_preemptions) == (5, 21)
    assert without.num_recomputed_tokens > with_buffers.num_recomputed_tokens > 0


def test_decodes_that_may_wait_in_a_pool_are_hardly_computed_again() -> None:
    workload = mixed_workload(36, 20.0, longest=80, longest_answer=200)

    def computed(pool_blocks: int) -> int:
        config = colocated(2, policy="aligned_slo", worker_blocks=40, pool_blocks=pool_blocks)
        without_host = replace_in(config.cluster.decode, swap_space_bytes=0)
        cluster = replace_in(config.cluster, decode=without_host, prefix_cache=PrefixCacheConfig(enabled=False))
        return sum(worker.num_prompt_tokens for worker in run(replace(config, cluster=cluster), workload).workers)

    sent = sum(request.prompt_len for request in workload.requests)
    assert computed(400) - sent < 0.1 * (computed(0) - sent)


# --- the same again


@each("name", ["short of blocks", "chunked"])
def test_two_runs_are_equal_to_the_last_digit(name: str) -> None:
    first, second = tight_run(name), run(CONFIGS[name], TIGHT)
    assert json.dumps(first.to_builtins()) == json.dumps(second.to_builtins())


_PRINT_RUN = """
import json
from tests.sim.test_runs import CONFIGS, TIGHT, run
print(json.dumps([run(CONFIGS[name], TIGHT).to_builtins() for name in ("nodes", "colocated")]))
"""


def test_the_seed_of_hashes_changes_nothing() -> None:
    """This process has a seed that was drawn, and the other one has 1."""
    there = subprocess.run(
        [sys.executable, "-c", _PRINT_RUN],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert json.loads(there) == json.loads(
        json.dumps([tight_run(name).to_builtins() for name in ("nodes", "colocated")])
    )


# --- ways to end


def test_a_run_that_is_cut_off_says_who_was_not_finished() -> None:
    result = run(disaggregated(duration_s=1.0), workload_of(timed(), timed(0.5, output_len=500), timed(2.0)))
    assert result.classes["all"].num_by_ending == {"completed": 1, "rejected": 0, "failed": 0, "unfinished": 1}


class _Documents:
    def __getitem__(self, number: int) -> TimedRequest:
        kind: dict[str, Any] = {"class_name": "documents", "request_class": RequestClass.BEST_EFFORT, "slo": Slo()}
        return timed(output_len=5 + number % 7, **kind)


@pytest.mark.parametrize("is_wave", [False, True])
@pytest.mark.parametrize("name", ["disaggregated", "colocated"])
def test_a_closed_loop_sends_on_until_all_are_sent(name: str, is_wave: bool) -> None:
    loop = ClosedLoop("documents", 4, is_wave, _Documents())
    result = run(CONFIGS[name], workload_of(timed(1.0), closed_loops=(loop,), max_closed=30))
    assert {key: one.num_by_ending["completed"] for key, one in result.classes.items()} == {
        "all": 31,
        "chat": 1,
        "documents": 30,
    }


def test_nothing_to_do_is_done_at_once() -> None:
    result = run(disaggregated(), workload_of())
    assert result.classes["all"].attainment is None
    assert result.duration_s == 0.0


def test_what_can_never_fit_is_said_before() -> None:
    with pytest.raises(ConfigError, match="6401 tokens"):
        Simulation(disaggregated(), workload_of(timed(), timed(1.0, prompt_len=6000, output_len=1, max_tokens=401)))


def test_an_unknown_policy_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'luck'; known: .*fcfs"):
        Simulation(colocated(policy="luck"), workload_of())


def test_a_policy_is_refused_by_what_it_needs_and_there_is_not() -> None:
    with pytest.raises(ConfigError, match="'oracle' needs what these workers do not have: known_lengths"):
        Simulation(colocated(policy="oracle"), workload_of(timed()))
    Simulation(colocated(policy="oracle"), workload_of(timed(predicted_len=3)))
    with pytest.raises(ConfigError, match="'apt_serve' needs what these workers do not have: hidden_cache"):
        Simulation(colocated(policy="apt_serve"), workload_of())
    Simulation(colocated(policy="apt_serve", mechanisms=SimMechanisms(hidden_ratio=0.5)), workload_of())


def test_progress_is_reported() -> None:
    seen: list[tuple[float, int]] = []
    Simulation(disaggregated(), mixed_workload(50, 5.0)).run(lambda seconds, ended: seen.append((seconds, ended)))
    assert seen[0] == (0.0, 0)
    assert seen == sorted(seen)
    assert seen[-1][1] > 30


def test_a_timeline_tells_every_iteration_of_one_worker() -> None:
    result = run(disaggregated(2, 2, timeline_of="decode-1"), mixed_workload(40, 6.0))
    worker = result.workers[-1]
    assert worker.name == "decode-1"
    assert len(result.timeline) == worker.num_iterations
    assert sum(line.num_decodes for line in result.timeline) == worker.num_decodes
    assert all(line.ended_s <= after.started_s for line, after in pairwise(result.timeline))
    assert all(line.num_blocks >= line.num_decodes for line in result.timeline)


def test_nodes_must_have_workers_of_both_kinds() -> None:
    with pytest.raises(ConfigError, match="num_pools must be between 1 and 1"):
        disaggregated(2, 1, num_pools=2)


@each("name", ["disaggregated", "colocated"])
def test_a_predicted_length_reaches_the_router_while_the_request_is_served(name: str) -> None:
    requests = [timed(0.1 * number, output_len=5 + number, max_tokens=50, predicted_len=8) for number in range(6)]
    lengths = run(CONFIGS[name], workload_of(*requests)).lengths
    assert (lengths.num_finished, lengths.num_predicted) == (6, 6)
    assert (lengths.num_tokens, lengths.error_tokens) == (45, 3 + 2 + 1 + 0 + 1 + 2)


# --- limits that clients do not set


def test_without_a_limit_of_its_own_a_request_may_fill_the_context() -> None:
    config = replace(colocated(worker_blocks=20), context_len=200)
    simulation = Simulation(config, workload_of(timed(prompt_len=40, output_len=30, max_tokens=None)))
    limit = simulation._gateway._limit
    assert [limit(timed(prompt_len=length, max_tokens=None)) for length in (40, 199, 250)] == [160, 1, 1]
    assert limit(timed(prompt_len=40, max_tokens=7)) == 7
    assert simulation.run().classes["chat"].num_sent == 1


def test_the_memory_of_a_worker_bounds_the_context() -> None:
    config = colocated(worker_blocks=20)
    assert (config.memory_tokens, config.max_context_len) == (320, 320)
    assert replace(config, context_len=1000).max_context_len == 320
    assert replace(config, context_len=200).max_context_len == 200


@each(
    ("context_len", "max_tokens", "complaint"),
    [
        (200, None, "request 0 of the workload comes to hold 250 tokens; the model's context is 200"),
        (None, None, "comes to hold 250 tokens; a decode worker's memory holds 160"),
        (None, 300, "may come to hold 350 tokens; a decode worker's memory holds 160"),
    ],
)
def test_an_answer_that_would_be_cut_is_refused(
    context_len: int | None, max_tokens: int | None, complaint: str
) -> None:
    num_blocks = 10 if context_len is None else 50
    config = replace(colocated(worker_blocks=num_blocks), context_len=context_len)
    with pytest.raises(ConfigError, match=complaint):
        Simulation(config, workload_of(timed(prompt_len=50, output_len=200, max_tokens=max_tokens)))


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
