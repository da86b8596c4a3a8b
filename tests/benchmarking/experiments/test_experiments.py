"""Helpers shared by the experiments: cases from names, and rows out of results."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

import pytest

from alignedserve.config.sections import Topology
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.workers import PrefillRequest
from alignedserve.scheduling.table import COLUMN_NAMES
from experiments import accelgen, alignedserve, alise, apt_serve, bros, common, unseen
from experiments.accelgen import ABLATIONS, OPT_13B, accelgen_case, cases_of, figures
from experiments.alignedserve import further_figures
from experiments.alise import LATENCY, SYSTEMS, AliseLoad, rate_at, throughputs
from experiments.apt_serve import (
    HELD,
    KV_ONLY,
    AptServeLoad,
    AttainmentCurve,
    WorkerSizes,
    advantages,
    curves_in,
    find_throughputs,
    throughput_rows,
)
from experiments.common import (
    ColocatedWorkerSpec,
    LabelledCase,
    Options,
    Row,
    chosen,
    colocated_case,
    line,
    over_seeds,
    pick,
    run,
    source_or,
    with_recorded,
)
from experiments.grid.points import Point, all_points
from experiments.grid.search import simulate
from experiments.grid.systems import DEFAULT, FIELD, System, families, others
from experiments.stragglers import case_of
from lab.commands.simulation.options import SimulateOptions
from lab.commands.simulation.simulate_cases import plan_cases
from lab.costmodel.choice import WorkerSpec
from lab.sim.simulation import Simulation
from lab.sim.sweep import Case, WorkloadLine
from lab.workload.grammar import ClassSpec, ClientLimit, PredictionKind, parse_classes
from lab.workload.requests import Workload

WORKER = ColocatedWorkerSpec(WorkerSpec("opt-13b", "a100-80g"), max_running_requests=64)


def _case(policy: str, seed: int = 1) -> LabelledCase:
    workload = line("rt: prompt=100, output=4, rate=5, ttft=1", seed, num_requests=3)
    return colocated_case({"rate": 5}, policy, WORKER, workload)


def test_a_policy_has_the_mechanisms_it_wants_and_no_others() -> None:
    bros, sarathi = (_case(policy).case.config for policy in ("bros", "sarathi"))
    assert (bros.mechanisms.has_shared_blocks, sarathi.mechanisms.has_shared_blocks) == (True, False)
    assert (bros.decode_memory.num_free_host > 0, sarathi.decode_memory.num_free_host) == (True, 0)


def test_a_row_has_labels_and_figures() -> None:
    rows = run([_case("fcfs", 1), _case("fcfs", 2)], processes=1)
    assert [(row["policy"], row["rate"], row["seed"]) for row in rows] == [("fcfs", 5, 1), ("fcfs", 5, 2)]
    assert rows[0]["rt.ttft_attainment"] == 1.0
    assert 0.0 < rows[0]["rt.ttft_s.mean"] < 1.0
    assert rows[0]["workload"] == "rt: prompt=100, output=4, rate=5, ttft=1"


def test_rows_of_several_seeds_become_means_with_their_spread() -> None:
    rows = [{"policy": "fcfs", "seed": seed, "x": value, "y": None} for seed, value in ((1, 2.0), (2, 4.0))]
    assert over_seeds(rows, ("policy",)) == [{"policy": "fcfs", "num_runs": 2, "x": 3.0, "x.spread": 2.0}]


def test_rows_are_picked_and_cut_down() -> None:
    rows: list[Row] = [{"policy": "fcfs", "x": 1.234567}, {"policy": "bros", "x": None}]
    assert pick(rows, policy="bros") == rows[1:]
    assert chosen(rows, ("x",)) == [{"x": 1.2346}, {"x": None}]


def test_a_source_that_is_not_here_is_replaced_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert source_or("sharegpt", "arxiv") == "sharegpt"
    assert source_or("./nowhere.csv", "arxiv") == "arxiv"
    assert "In its place: arxiv." in capsys.readouterr().out


def test_what_goes_wrong_in_a_case_is_said_with_its_name() -> None:
    case = colocated_case({}, "fcfs", WORKER, line("rt: prompt=900000, output=4, rate=5", 1))
    with pytest.raises(RuntimeError, match="policy=fcfs seed=1: request 0"):
        run([case], processes=1)


def test_only_some_policies_run_again_and_the_record_of_the_others_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    recorded = [{"policy": "fcfs", "x": 1}, {"policy": "bros", "x": 1}]
    (tmp_path / "some.json").write_text(json.dumps({"figures": {"runs": recorded}}))
    options = Options(is_quick=False, processes=1, is_recorded=True, policies=("bros",))
    assert [case.labels["policy"] for case in options.select([_case("fcfs"), _case("bros")])] == ["bros"]
    assert with_recorded("some", [{"policy": "bros", "x": 2}], options) == [
        {"policy": "bros", "x": 2},
        {"policy": "fcfs", "x": 1},
    ]


def test_only_some_parts_run_again_and_the_record_of_the_others_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    recorded = [{"policy": "bros", "part": part, "x": 1} for part in ("figure 1", "figure 2")]
    (tmp_path / "some.json").write_text(json.dumps({"figures": {"runs": recorded}}))
    options = Options(is_quick=False, processes=1, is_recorded=True, policies=(), parts=("figure 1",))
    assert [options.wants(row) for row in recorded] == [True, False]
    assert with_recorded("some", [], options) == recorded[1:]


# AccelGen's experiment in little: that it runs, and that its main findings are there.


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


# ALISE's experiment in little.


@pytest.mark.slow
def test_the_shortest_first_keeps_latency_low_where_the_first_come_does_not() -> None:
    load = AliseLoad("opt-13b", "sharegpt", 2.5, 60.0)
    cases = [load.case("figure 6", name, 1) for name in ("vLLM", "ALISE", "aligned_slo")]
    fcfs, alise, union = over_seeds(run(cases, processes=1), ("policy",))
    assert max(alise[LATENCY], union[LATENCY]) < 0.7 * fcfs[LATENCY]


# ALISE's experiment: the rate that a figure is read off at.


def _row(policy: str, rate: float, latency_s: float) -> Row:
    labels = {"part": "figure 6", "model": "opt-13b", "lengths": "alpaca"}
    return {**labels, "policy": policy, "rate": rate, "seed": 1, LATENCY: latency_s}


def test_between_two_rates_the_logarithm_of_latency_is_a_line() -> None:
    rows = [_row("vLLM", 4.0, 0.05), _row("vLLM", 8.0, 0.1), _row("vLLM", 12.0, 0.4)]
    assert rate_at(rows, 0.2) == pytest.approx(10.0)


def test_a_latency_that_is_not_reached_has_no_rate() -> None:
    assert rate_at([_row("vLLM", 4.0, 0.05), _row("vLLM", 8.0, 0.1)]) is None
    assert rate_at([_row("vLLM", 4.0, 0.5), _row("vLLM", 8.0, 0.9)]) is None


def test_throughput_is_compared_with_that_of_vllm() -> None:
    rows = [_row("vLLM", 4.0, 0.1), _row("vLLM", 8.0, 0.4), _row("ALISE", 8.0, 0.1), _row("ALISE", 10.0, 0.4)]
    found = {row["policy"]: row["times"] for row in throughputs(rows)}
    assert found == {"vLLM": 1.0, "ALISE": pytest.approx(1.5)}


def test_every_system_can_be_simulated() -> None:
    for name in SYSTEMS:
        case = AliseLoad("opt-13b", "alpaca", 10.0, 1.0).case("any", name, 1)
        assert case.labels["policy"] == name


# The experiment of Apt-Serve: how the highest rate at a level is found, and what it is compared with.


def _found(first_below: int) -> AttainmentCurve:
    """Return the curve of a policy that holds everything up to a rate, and half from the next on."""
    curve = AttainmentCurve("sharegpt", "opt-13b", "fcfs")
    while numbers := curve.wanted():
        curve.held |= {number: 1.0 if number < first_below else 0.5 for number in numbers}
    return curve


def test_a_level_is_found_by_bisection_and_interpolated() -> None:
    curve = _found(first_below=7)
    assert len(curve.held) <= 5
    assert curve.bracket(0.9) == (6, 7)
    assert curve.throughput(0.9) == pytest.approx(curve.rate(6) * 1.25**0.2)
    rows = [
        {"part": "figure 8", "dataset": curve.dataset, "model": curve.model, "policy": curve.policy}
        | {"rate": float(f"{curve.rate(number):.4g}"), HELD: held}
        for number, held in curve.held.items()
    ]
    assert curves_in(rows) == [curve]
    assert curve.throughput(0.6) == pytest.approx(curve.rate(6) * 1.25**0.8)


@pytest.mark.parametrize("first_below", [0, 20])
def test_a_rate_beyond_the_grid_is_not_known(first_below: int) -> None:
    curve = _found(first_below)
    assert curve.wanted() == []
    assert curve.throughput(0.9) is None


def test_advantages_are_means_over_models_where_both_are_known() -> None:
    rows = [
        {"dataset": "sharegpt", "model": model, "policy": policy, "rate at 90%": rate, "rate at 60%": None}
        for model, policy, rate in (
            ("opt-13b", "apt_serve", 4.0),
            ("opt-13b", "fcfs", 2.0),
            ("opt-30b", "apt_serve", 4.0),
            ("opt-30b", "fcfs", 1.0),
            ("opt-66b", "apt_serve", 4.0),
            ("opt-66b", "fcfs", None),
        )
    ]
    first = advantages(rows)[0]
    assert (first["policy"], first["baseline"]) == ("apt_serve", "fcfs")
    assert (first["90%"], first["90%, most"], first["90%, least"], first["60%"]) == (3.0, 4.0, 2.0, None)


def test_the_ablation_has_no_hidden_caches_and_measured_costs_the_smaller_memory() -> None:
    with_hidden, without = (
        AptServeLoad("sharegpt", 3.0, 4).case("", policy, 1).case.config for policy in ("apt_serve", KV_ONLY)
    )
    assert (with_hidden.mechanisms.hidden_ratio, without.mechanisms.hidden_ratio) == (0.5, None)
    measured = AptServeLoad("sharegpt", 3.0, 4, costs="vllm").case("", "apt_serve", 1).case.config
    assert measured.cluster.decode.kv_cache_bytes == with_hidden.cluster.decode.kv_cache_bytes


@pytest.mark.slow
def test_the_whole_way_in_little() -> None:
    curves = [AttainmentCurve("humaneval", "opt-13b", policy) for policy in ("fcfs", "apt_serve")]
    rows = find_throughputs(curves, WorkerSizes(20, (1,), processes=1))
    assert throughput_rows(curves_in(rows)) == throughput_rows(curves)
    assert [row["policy"] for row in throughput_rows(curves)] == ["fcfs", "apt_serve"]


# Each experiment in little: that it runs, and that its main finding is there.


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


# Simulations of the grid's points, small ones.


def test_every_system_can_be_configured_and_every_workload_built() -> None:
    for point in {one.trace: one for one in all_points(minutes=0.5)}.values():
        assert point.workload().build().requests
    for systems, first in families(2):
        assert systems[first].config(2).cluster.decode.count in (1, 2)
    assert {one.policy for one in others(4).values()} == {one.policy for one in FIELD}
    assert DEFAULT.config(4).cluster.chosen_topology is Topology.ELASTIC


def test_another_seed_and_another_length_are_other_workloads_under_other_names() -> None:
    first = Point("azure_conv", 0.54, "tight", 2, has_best_effort=False, minutes=0.5)
    assert first.of_seed(2).name == f"{first.name}/seed2"
    assert first.name.endswith("/alone/0.5min")
    assert first.of_seed(2).workload().build().requests != first.workload().build().requests
    assert Point("azure_conv", 0.54, "tight", 2, has_best_effort=False).workload().duration_s == 600.0


def test_an_abandoned_case_could_not_have_held_more() -> None:
    point = Point("azure_conv", 0.78, "mixed", 2, has_best_effort=True, minutes=0.6)
    system = System("fcfs", Topology.COLOCATED)
    whole = simulate(point, system, 0)
    assert 0 < whole.num_met < whole.num_sent
    assert whole.best_effort_tokens_per_s
    assert whole.fluidity is not None
    assert 0.0 < whole.fluidity < 1.0
    assert simulate(point, system, whole.num_met).num_met == whole.num_met
    abandoned = simulate(point, system, whole.num_met + 1)
    assert abandoned.at_most == whole.num_met
    assert abandoned.ended_s <= whole.ended_s


# Elastic workers keep long contexts apart where attention waits for the longest.


def test_long_contexts_gather_where_attention_waits_for_them() -> None:
    cases = [case_of("flash-attention-2", system, 20.0) for system in ("aligned_slo", "sarathi")]
    ours, sarathi = run(cases, processes=2, also=further_figures)
    assert ours["all.loaded_tokens_per_s"] > 1.1 * sarathi["all.loaded_tokens_per_s"]
    assert ours["straggler_share"] < 0.8 * sarathi["straggler_share"]


# No shipped experiment, and no default of `simulate`, tells schedulers a length or a cost that no live one knows.

SIZES = apt_serve.WorkerSizes(10, (1,), 1)
TELLING = {"ORCA, exact"}  # a baseline of ALISE's paper that reserves what will be needed: named by what it knows
KNOWING = {"Oracle"}  # ALISE with exact predictions: likewise


def labelled_cases() -> Iterator[LabelledCase]:
    """Return every case of every experiment; of AccelGen's, whose workloads take long to build, the reduced ones."""
    for parts in (alignedserve.parts_of(is_quick=False), unseen.parts_of(is_quick=False)):
        for part in parts:
            yield from part
    yield from alise.cases_of(is_quick=False)
    yield from bros.cases_of(is_quick=False)
    yield from accelgen.cases_of(is_quick=True)
    for make in (apt_serve.tables_4_and_5, apt_serve.figure_9, apt_serve.other_costs):
        yield from make(SIZES)
    for curve in apt_serve.curves_of(is_quick=False):
        yield apt_serve.AptServeLoad(curve.dataset, 1.0, 10, model=curve.model).case("figure 8", curve.policy, 1)


def cases() -> list[tuple[str, Case]]:
    own = [(str(labelled.labels["policy"]), labelled.case) for labelled in labelled_cases()]
    return own + [(one.policy, one.case) for one in plan_cases(SimulateOptions())]


def specs_of(case: Case) -> tuple[ClassSpec, ...]:
    workload = case.workload
    return parse_classes(workload.line if isinstance(workload, WorkloadLine) else workload.description.name)


def test_limits_tell_no_lengths_and_costs_are_learned() -> None:
    found = cases()
    assert len(found) > 600
    for name, case in found:
        assert case.config.learns_costs, case.name
        for spec in specs_of(case):
            is_telling = spec.max_tokens in (ClientLimit.EXACT, ClientLimit.POWER_OF_TWO)
            assert is_telling == (name in TELLING), case.name
            is_exact = spec.prediction is not None and spec.prediction.kind is PredictionKind.EXACT
            assert is_exact == (name in KNOWING), case.name


def test_what_schedulers_get_has_no_place_for_a_true_length() -> None:
    names = {field.name for kind in (Request, SamplingParams) for field in fields(kind)}
    names |= set(chain(*COLUMN_NAMES)) | set(PrefillRequest.__struct_fields__)
    assert {name for name in names if "output" in name or "answer" in name} == {"predicted_output_len"}
