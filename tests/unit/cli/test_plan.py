"""`alignedserve plan`: what it refuses, small plans, the report, and the file that starts one."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from alignedserve.cli.main import main
from alignedserve.config.loading import load_config
from alignedserve.config.sections import Topology
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.linear import LinearCoefficients
from alignedserve.costmodel.model_shapes import ModelShape
from lab.costmodel.profile_file import MachineProfile
from tests.harnesses.simulation import colocated, mixed_workload
from tests.replay.recorded import recorded_run_folder

pytestmark = pytest.mark.slow

LINE = "rt: prompt=200, output=8, rate=6, ttft=1, tpot=0.1; be: prompt=100, output=4, rate=2"
HARD = "prompt=2000, output=40, rate=20, ttft=0.2, tpot=0.03"
QUICK = ("--processes", "1", "--duration", "3", "--policy", "fcfs")
H100 = ("--hardware", "2x h100 @2.5")


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["alignedserve", "plan", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def planned(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> tuple[int, dict[str, object]]:
    """Return the exit code, and plan.json."""
    code = run_command(monkeypatch, *arguments, "--output", str(folder))
    document: dict[str, object] = json.loads((folder / "plan.json").read_text())
    return code, document


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --workload LINE and --from DIR"),
        (("--workload", LINE), "--hardware is missing"),
        (("--workload", LINE, "--hardware", "2x k80"), "'k80' is none of v100-32g.*alignedserve profile MODEL"),
        (("--workload", LINE, "--hardware", "2x recorded"), "goes with --from"),
        (("--workload", LINE, "--hardware", "fitted:no.json"), "profile no.json cannot be read"),
        (("--workload", LINE, *H100, "--model", "gpt"), "model 'gpt' is none of opt-125m"),
        (("--workload", LINE, *H100, "--costs", "guess"), "cost model 'guess' is none of"),
        (("--workload", LINE, *H100, "--kernel", "guess"), "kernel 'guess' is none of load_balanced"),
        (("--workload", LINE, *H100, "--policy", "nonesuch"), "unknown policy 'nonesuch'"),
        (("--workload", LINE, *H100, "--policy", "fcfs", "--policy", "fcfs"), "named twice"),
        (("--workload", LINE, *H100, "--topology", "star"), "'star' is none of elastic, colocated, disaggregated"),
        (
            ("--workload", LINE, *H100, "--topology", "elastic", "--policy", "distserve"),
            "'distserve' is for disaggregated workers, not for elastic ones",
        ),
        (("--workload", LINE, *H100, "--tensor-parallel", "two"), "no list of numbers"),
        (("--workload", LINE, *H100, "--tensor-parallel", "00640"), "no list of numbers from 1 to 64"),
        (("--workload", LINE, *H100, "--expert-parallel", "2"), "on CPUs alone, not on h100; measure a host"),
        (
            ("--workload", LINE, *H100, "--tensor-parallel", "1,3"),
            "-parallel 1,3 must divide the 40 heads of 'llama-2-",
        ),
        (("--workload", LINE, *H100, "--set", "decode.count=4"), "that is what the plan is to say"),
        (("--workload", LINE, *H100, "--set", "engine.tensor_parallel=2"), "that is what the plan is to say"),
        (("--workload", LINE, "--hardware", "2x h100", "--max-cost", "4"), "--max-cost needs prices"),
        (("--workload", LINE, *H100, "--max-cost", "1"), "no plan is possible for 1 per hour"),
        (("--workload", "prompt=9, output=9, rate=1", *H100), "no request .* has an objective: give --ttft"),
        (("--workload", "prompt=9, output=9, rate=0.0001, ttft=1", *H100, "--duration", "1"), "no request .* comes"),
        (("--workload", "prompt=900000, output=9, rate=1, ttft=1", *H100), "comes to hold 900009 tokens"),
        (("--workload", LINE, *H100, "--model", "opt-175b"), "no plan can run this workload: .*does not fit"),
        (("--workload", LINE, *H100, "--output", "/dev/null/x"), "--output /dev/null/x: cannot be made"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run_command(monkeypatch, *arguments) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err), captured.err


def test_a_recording_that_is_not_there_is_no_plan_that_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "--from", "nowhere") == 2
    assert re.search("--from: nowhere.*cannot be read", capsys.readouterr().err)


def test_a_plan_that_holds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, document = planned(monkeypatch, tmp_path, "--workload", LINE, *H100, "--model", "opt-125m", *QUICK)
    assert code == 0
    output = capsys.readouterr().out
    assert "Plan: 1 x h100, 1 elastic, fcfs, 2.50 per hour." in output
    assert "Attention: 0.0% of decode attention is assumed for stragglers, kernel load_balanced." in output
    assert document["is_held"] is True
    page = (tmp_path / "report.html").read_text()
    assert "attained against cost" in page
    assert "src=" not in page
    config = load_config(tmp_path / "plan.yaml")
    assert (config.topology, config.decode.count, config.scheduling.policy) == (Topology.ELASTIC, 1, "fcfs")
    assert (config.model.path, config.engine.device) == ("facebook/opt-125m", "cuda")
    assert config.decode.max_num_batched_tokens == 2048


def test_a_plan_of_tensor_parallel_workers_can_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("--model", "llama-3-8b", "--tensor-parallel", "2", "--kernel", "flash_attention_2", *QUICK)
    _, document = planned(monkeypatch, tmp_path, "--workload", LINE, *H100, *options)
    config = load_config(tmp_path / "plan.yaml")
    assert (config.decode.count, config.engine.tensor_parallel) == (1, 2)
    plan = document["plan"]
    assert isinstance(plan, dict)
    assert plan["can_be_served"]
    assert 0.0 < plan["straggler_share"] < 1.0


def test_a_plan_has_its_own_degrees_whatever_the_configuration_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("engine: {tensor_parallel: 2, pipeline_parallel: 2, block_size: 32}\n")
    options = (*H100, *QUICK, "--model", "opt-125m", "--topology", "elastic", "--tensor-parallel", "1")
    planned(monkeypatch, tmp_path, "--workload", LINE, *options, "--config", str(path))
    engine = load_config(tmp_path / "plan.yaml").engine
    assert (engine.tensor_parallel, engine.pipeline_parallel, engine.block_size) == (1, 1, 32)


def test_a_plan_is_the_same_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("--workload", LINE, *H100, *QUICK, "--model", "opt-125m", "--topology", "elastic")
    found = [planned(monkeypatch, tmp_path / name, *options)[1] for name in ("one", "two")]
    for document in found:
        del document["about"], document["machine"]
    assert found[0] == found[1]


def test_objectives_that_no_plan_meets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    quick = ("--processes", "1", "--duration", "1", "--policy", "fcfs", "--topology", "elastic")
    code, document = planned(monkeypatch, tmp_path, "--workload", HARD, *H100, "--model", "llama-2-13b", *quick)
    assert code == 1
    output = capsys.readouterr().out
    assert "No plan that can be started holds the objectives of 99 %" in output
    assert "It holds TTFT" in output
    assert document["plan"] is None
    assert not (tmp_path / "plan.yaml").exists()
    variations = document["variations"]
    assert isinstance(variations, list)
    assert any("2 times" in one["words"] or "h100" in one["words"] for one in variations)


def test_lengths_of_another_tokenizer_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "night.csv"
    trace.write_text("arrival_s,prompt_len,output_len,model\n" + "".join(f"{n},50,4,GPT-4\n" for n in range(5)))
    options = ("--ttft", "1", "--tpot", "0.1", "--model", "opt-125m", "--processes", "1", "--policy", "fcfs")
    assert planned(monkeypatch, tmp_path, "--workload", str(trace), *H100, *options)[0] == 0
    assert f"The lengths of {trace} are tokens of GPT-4" in capsys.readouterr().err


def test_a_measured_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file states the sizes that were simulated, so that `serve` takes no others."""
    shape = ModelShape("tiny", 2, 64, 4, 4, 16, 256, 512, is_gated=False, ties_embeddings=True, dtype="float32")
    costs = LinearCoefficients(base_s=0.002, prompt_token_s=1e-5, decode_s=1e-4)
    profile = tmp_path / "here.json"
    profile.write_text(
        json.dumps({**MachineProfile(shape, costs, LinkModel(0.0, 1e9)).as_fields(), "machine": {"threads": 3}})
    )
    options = ("--workload", LINE, "--hardware", f"2x fitted:{profile}", "--processes", "1", "--duration", "3")
    code, document = planned(monkeypatch, tmp_path, *options, "--topology", "disaggregated")
    assert (code, document["is_held"]) == (0, True)
    config = load_config(tmp_path / "plan.yaml")
    assert (config.topology, config.prefill.count, config.decode.count) == (Topology.DISAGGREGATED, 1, 1)
    assert (config.model.path, config.model.dtype) == ("tiny", "float32")
    assert type(config.decode.kv_cache_bytes) is int
    assert (config.engine.device, config.engine.threads_per_worker) == ("auto", 3)


def mixture_profile(path: Path, num_experts: int, *, cores: int = 16) -> str:
    """Write the profile of a machine that computes a slow mixture by two threads, or a dense model."""
    shape = ModelShape("mixture", 8, 512, 4, 4, 128, 64, 512, is_gated=True, ties_embeddings=True, dtype="float32")
    if num_experts:
        shape = replace(shape, num_experts=num_experts, num_chosen_experts=2, expert_size=512, num_expert_layers=8)
    costs = LinearCoefficients(base_s=0.08, prompt_token_s=2e-4, decode_s=1e-3)
    fields = MachineProfile(shape, costs, LinkModel(0.0, 1e9)).as_fields()
    path.write_text(json.dumps({**fields, "machine": {"threads": 2, "cores": cores}}))
    return f"8x fitted:{path}"


def test_processes_that_share_experts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One process is too slow for the objective, however many workers there are; more of them together hold it."""
    hardware = mixture_profile(tmp_path / "here.json", 16, cores=8)
    line = "prompt=100, output=20, rate=2, ttft=1, tpot=0.06"
    options = ("--hardware", hardware, "--processes", "1", "--duration", "5", "--topology", "elastic")
    code, document = planned(monkeypatch, tmp_path / "plan", "--workload", line, *options)
    output = capsys.readouterr().out
    assert code == 0, output
    found, about = document["plan"], document["about"]
    assert isinstance(found, dict)
    assert isinstance(about, dict)
    config = load_config(tmp_path / "plan" / "plan.yaml")
    assert config.engine.expert_parallel == found["expert_parallel"] > 1
    assert config.engine.threads_per_worker == 2 * found["expert_parallel"]
    assert found["num_accelerators"] == found["expert_parallel"] * found["num_decode"]
    assert "which share experts" in output
    assert re.search(r"Experts shared by 2 processes of here.json: weights of .* GiB .* us a layer", output)
    assert (
        "8 processes of 2 threads that share experts are on one host"
        in about["experts shared by 8 processes of here.json"]
    )


@pytest.mark.parametrize(
    ("num_experts", "asked", "message"), [(0, "2", "has no experts"), (3, "2,4", "3 experts, whole in one")]
)
def test_experts_that_cannot_be_shared(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    num_experts: int,
    asked: str,
    message: str,
) -> None:
    hardware = mixture_profile(tmp_path / "here.json", num_experts)
    assert run_command(monkeypatch, "--workload", LINE, "--hardware", hardware, "--expert-parallel", asked) in (1, 2)
    assert message in capsys.readouterr().err


def test_a_plan_from_a_recorded_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = recorded_run_folder(tmp_path / "run", colocated(2, learns_costs=True), mixed_workload(40, 4.0, 1))
    code, document = planned(monkeypatch, tmp_path / "plan", "--from", str(run), "--processes", "1", "--policy", "fcfs")
    assert code == 0, capsys.readouterr()
    found = document["plan"]
    assert isinstance(found, dict)
    assert (found["hardware"], found["num_accelerators"]) == ("recorded", 2)
    assert load_config(tmp_path / "plan" / "plan.yaml").recording.folder is None


def test_probes_of_a_recorded_run_are_load_without_objectives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("lab.replay.simulated._PROBE", "r0")  # so that the run has nothing else
    run = recorded_run_folder(tmp_path / "run", colocated(2, learns_costs=True), mixed_workload(40, 4.0, 1))
    assert run_command(monkeypatch, "--from", str(run), "--ttft", "9", "--output", str(tmp_path / "plan")) == 2
    assert "no request of the workload has an objective" in capsys.readouterr().err
