"""`alignedserve simulate`: what it refuses, and one small run."""

import json
import re
import sys
from pathlib import Path

import pytest

from alignedserve.cli.main import main
from alignedserve.config.sections import Topology
from lab.commands.simulation import simulate as simulate_command
from lab.commands.simulation.options import SimulateOptions
from lab.commands.simulation.simulate_cases import plan_cases
from lab.sim.sweep import WorkloadLine
from lab.workload.requests import Workload

LINE = "rt: prompt=200, output=8, rate=6, ttft=1, tpot=0.1; be: prompt=100, output=4, rate=2, deadline=9"
SMALL = ("simulate", "--workload", LINE, "--duration", "3", "--processes", "1")


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["alignedserve", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "nonesuch"), "unknown policy 'nonesuch'; known: .*sarathi"),
        (("--policy", "alise:levels=3"), "no parameter 'levels'; known: num_levels"),
        (("--policy", "alise:levels"), "write NAME:parameter=value"),
        (("--policy", "fcfs", "--policy", "fcfs"), "named twice"),
        (("--model", "gpt"), "model 'gpt' is none of opt-125m"),
        (("--hardware", "k80"), "hardware 'k80' is none of v100-32g"),
        (("--costs", "guess"), "cost model 'guess' is none of roofline.*fitted:FILE"),
        (("--costs", "fitted:no.json"), "profile no.json cannot be read"),
        (("--costs", "fitted:no.json", "--model", "opt-13b"), "says itself which model"),
        (("--workload", "nonesuch, rate=1"), "unknown lengths or trace 'nonesuch'; .*azure_conv"),
        (("--workload", "./no.csv, arrivals=recorded"), "no.csv"),
        (("--workload", "be: prompt=9, output=9, outstanding=2", "--rate", "3"), "closed loops only"),
        (("--rate", "fast"), "--rate 'fast' is not a number"),
        (("--rate", "0"), "--rate '0' is not a number"),
        (("--workload", "prompt=90000, output=9, rate=1"), "comes to hold 90009 tokens"),
        (("--model", "opt-13b", "--workload", "prompt=3000, output=9, rate=1"), "the model's context is 2050"),
        (("--model", "opt-175b"), "does not fit 1 x 'a100-80g'"),
        (("--model", "llama-3-8b", "--policy", "apt_serve"), "'apt_serve' needs .* hidden_cache"),
        (("--pools", "2"), "num_pools must be between 1 and 1"),
        (("--nodes", "2", "--pools", "2"), "--nodes gives each node its own workers"),
        (("--nodes", "2", "--routers", "3"), "routers must be between 1 and 2"),
        (("--policy", "orca", "--set", "topology=disaggregated"), "'orca' is for colocated or elastic workers"),
        (("--policy", "aligned", "--workers", "2"), "policy 'aligned' is for disaggregated workers"),
        (("--policy", "distserve", "--set", "topology=elastic"), "'distserve' is for disaggregated workers"),
        (("--set", "scheduling.policy=fcfs"), "here --policy says that"),
        (("--set", "decode.count=4"), "here --decode or --workers says that"),
        (("--set", "decode.kv_cache_bytes=4GiB"), "memory follows from --model"),
        (("--set", "topology=elastic", "--set", "pool.lease_s=9"), "pool.lease_s has no effect in elastic workers"),
        (("--set", "scaling.max_nodes=4"), "scaling.max_nodes: nodes that come and go are not simulated"),
        (("--set", "scaling.max_wait_s=2"), "scaling.max_wait_s: nodes that come and go are not simulated"),
        (("--set", "decode.max_runing=4"), "max_runing"),
        (("--set", "engine.pipeline_parallel=2"), "engine.pipeline_parallel: simulated workers are tensor-parallel"),
        (("--set", "engine.expert_parallel=2"), "engine.expert_parallel: simulated workers are tensor-parallel alone"),
        (
            ("--set", "engine.tensor_parallel=2", "--tensor-parallel", "4"),
            "--tensor-parallel 4: engine.tensor_parallel says 2",
        ),
        (("--costs", "fitted:no.json", "--set", "engine.tensor_parallel=2"), "says itself which model"),
        (("--set", "topology=elastic", "--policy", "fcfs", "--prefill", "2"), "--prefill 2: no policy has separate"),
        (("--policy", "fcfs", "--prefill", "2", "--workers", "3"), "--prefill 2: no policy has separate workers here"),
        (("--workload", "prompt=9, output=9, rate=0.001", "--duration", "3"), "rate=0.001': no request comes"),
        (("--config", "no.yaml"), "no.yaml: cannot be read"),
        (("--output", "/dev/null/x"), "--output /dev/null/x: cannot be made"),
    ],
)
def test_what_cannot_run_is_said_in_one_line_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run_command(monkeypatch, "simulate", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err), captured.err


def workers_of(*policies: str, **options: object) -> dict[str, tuple[Topology, int, int]]:
    """Return topology, prefill workers and decode workers by policy."""
    planned = plan_cases(SimulateOptions(policies=policies, workload=LINE, **options))  # type: ignore[arg-type]
    clusters = {one.policy: one.case.config.cluster for one in planned}
    return {name: (one.chosen_topology, one.prefill.count, one.decode.count) for name, one in clusters.items()}


def test_every_node_has_as_many_workers_as_asked_for() -> None:
    chosen = workers_of("aligned", "fcfs", num_prefill=2, num_decode=1, num_nodes=5)
    assert chosen["aligned"] == (Topology.DISAGGREGATED, 10, 5)
    assert chosen["fcfs"] == (Topology.COLOCATED, 10, 15)


def test_every_policy_gets_as_many_accelerators_in_its_own_topology() -> None:
    assert workers_of("aligned", "aligned_slo", "fcfs") == {
        "aligned": (Topology.DISAGGREGATED, 1, 1),
        "aligned_slo": (Topology.ELASTIC, 1, 2),
        "fcfs": (Topology.COLOCATED, 1, 2),
    }
    assert workers_of("aligned", "aligned_slo", "fcfs", num_prefill=3, num_decode=2) == {
        "aligned": (Topology.DISAGGREGATED, 3, 2),
        "aligned_slo": (Topology.ELASTIC, 3, 5),
        "fcfs": (Topology.COLOCATED, 3, 5),
    }
    assert workers_of("aligned_slo", "fcfs", num_workers=4) == {
        "aligned_slo": (Topology.ELASTIC, 1, 4),
        "fcfs": (Topology.COLOCATED, 1, 4),
    }
    colocated = workers_of("aligned_slo", num_workers=4, overrides=("topology=colocated",))
    assert colocated == {"aligned_slo": (Topology.COLOCATED, 1, 4)}
    assert workers_of("fcfs", overrides=("topology=disaggregated",)) == {"fcfs": (Topology.DISAGGREGATED, 1, 1)}


def test_a_configuration_file_is_simulated_as_it_would_be_served(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("topology: colocated\ndecode: {count: 3}\nscheduling: {policy: bros}\n")
    assert workers_of(config=path) == {"bros": (Topology.COLOCATED, 1, 3)}
    assert workers_of("fcfs", config=path) == {"fcfs": (Topology.COLOCATED, 1, 3)}
    path.write_text("decode: {count: 3}\n")
    assert workers_of(config=path) == {"aligned_slo": (Topology.ELASTIC, 1, 3)}
    path.write_text("decode: {count: 3}\nprefill: {count: 1}\n")
    assert workers_of(config=path) == {"aligned_slo": (Topology.DISAGGREGATED, 1, 3)}


def test_the_degree_of_a_configuration_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"

    def memory_tokens(configured: int, asked: int | None) -> int:
        path.write_text(f"engine: {{tensor_parallel: {configured}}}\ndecode: {{count: 1}}\n")
        options = SimulateOptions(workload=LINE, config=path, tensor_parallel=asked)
        config = plan_cases(options)[0].case.config
        assert config.cluster.engine.tensor_parallel == (asked or configured)
        return config.memory_tokens

    assert memory_tokens(2, None) == memory_tokens(2, 2) == memory_tokens(1, 2) > 2 * memory_tokens(1, None)


def test_ctrl_c_reports_the_simulations_that_are_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(line: WorkloadLine) -> Workload:
        if "rate=1.5" in line.line:
            raise KeyboardInterrupt
        return built(line)

    built = WorkloadLine.build
    arguments = (*SMALL, "--policy", "fcfs", "--output", str(tmp_path))
    planned = plan_cases(SimulateOptions(policies=("fcfs",), workload=LINE, duration_s=3.0, rates=("8", "2")))
    monkeypatch.setattr(simulate_command, "plan_cases", lambda options: planned)
    monkeypatch.setattr(WorkloadLine, "build", build)
    assert run_command(monkeypatch, *arguments) == 130
    assert "interrupted: 1 of 2 simulations are over" in capsys.readouterr().err
    cases = json.loads((tmp_path / "simulation.json").read_bytes())["cases"]
    assert [one["rate"] for one in cases] == [8.0]


def test_a_rate_is_the_lines_own_unless_it_is_said() -> None:
    planned = plan_cases(SimulateOptions(policies=("fcfs",), workload=LINE, duration_s=500.0))
    assert [one.rate for one in planned] == [8.0]
    planned = plan_cases(SimulateOptions(policies=("fcfs",), workload=LINE, rates=("2,4", "16")))
    assert [one.rate for one in planned] == [2.0, 4.0, 16.0]


def test_the_rate_of_a_recording_is_that_of_its_gaps(tmp_path: Path) -> None:
    for arrivals, rate in (((0, 1, 4), 0.5), ((7,), 0.0), ((3, 3), 0.0)):
        path = tmp_path / f"{rate} {len(arrivals)}.csv"
        path.write_text("arrival_s,prompt_len,output_len\n" + "".join(f"{one},9,9\n" for one in arrivals))
        planned = plan_cases(SimulateOptions(policies=("fcfs",), workload=f"{path}, arrivals=recorded"))
        assert [one.rate for one in planned] == [rate]


def test_a_small_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policies = ("--policy", "aligned_slo", "--policy", "sarathi:token_budget=256")
    assert run_command(monkeypatch, *SMALL, *policies, "--rate", "4,8", "--output", str(tmp_path / "new")) == 0
    captured = capsys.readouterr()
    assert captured.out.count("aligned_slo") == 2 * 2 * 3  # in two tables: all, be and rt at either rate
    assert "report.html has the plots" in captured.err
    page = (tmp_path / "new" / "report.html").read_text()
    assert "sarathi:token_budget=256" in page
    document = json.loads((tmp_path / "new" / "simulation.json").read_text())
    assert document["about"]["workload"].startswith(LINE)
    assert "cpu" in document["machine"]
    cases = document["cases"]
    assert [(one["policy"], one["rate"]) for one in cases] == [
        ("aligned_slo", 4.0),
        ("aligned_slo", 8.0),
        ("sarathi", 4.0),
        ("sarathi", 8.0),
    ]
    assert cases[2]["policy_settings"]["token_budget"] == 256
    assert cases[0]["cluster"]["topology"] == "elastic"
    assert all(one["result"]["classes"]["all"]["attainment"] == 1.0 for one in cases)
    assert all(one["error"] is None and one["result"]["timeline"] for one in cases)


def test_no_figure_is_cut_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("alignedserve.cli.console._TABLE_WIDTH", None)  # as where the output is a terminal
    assert run_command(monkeypatch, *SMALL, "--policy", "fcfs", "--output", str(tmp_path)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "fcfs" in line]
    assert [len(row) for row in rows] == [15, 13, 13, 8, 8, 8]


def test_json_goes_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command(monkeypatch, *SMALL, "--policy", "fcfs", "--json", "--output", str(tmp_path)) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["cases"]] == ["fcfs at 8/s"]
