"""Helpers shared by the experiments: cases from names, and rows out of results."""

import json
from pathlib import Path

import pytest

from experiments import common
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
from lab.costmodel.choice import WorkerSpec

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
