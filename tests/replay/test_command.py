"""`alignedserve replay` on recordings of simulated and of real components, and its report of their times."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alignedserve.config.sections import RecordingConfig, Topology
from alignedserve.core.errors import ConfigError, RecordingError
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.linear import LinearCoefficients
from alignedserve.costmodel.model_shapes import ModelShape
from alignedserve.process.recording import PART_FILE, RecordedPart
from decode_worker.logic import DecodeLogic
from lab.commands.simulation.options import ReplayOptions
from lab.commands.simulation.replay import parse_outstanding, replay, replay_folder
from lab.costmodel.profile_file import MachineProfile
from lab.sim.config import SimConfig
from tests.harnesses.simulation import colocated, disaggregated, mixed_workload
from tests.replay.recorded import random_run, recorded_run_folder
from tests.support.marks import each, slow


def recorded(folder: Path, config: SimConfig, seed: int, num_requests: int = 12) -> Path:
    return recorded_run_folder(folder, config, mixed_workload(num_requests, 4.0, seed))


def run_json(capsys: pytest.CaptureFixture[str], options: ReplayOptions) -> tuple[int, Any]:
    code = replay(options)
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("config", slow(disaggregated(learns_costs=True), colocated(learns_costs=True)))
def test_a_simulation_of_a_simulation_is_that_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: SimConfig
) -> None:
    """Costs are fitted to one run, and another one is compared: a machine without jitter is met within 5 %."""
    other, judged = (recorded(tmp_path / name, config, seed, 60) for name, seed in (("other", 1), ("judged", 2)))
    code, report = run_json(capsys, ReplayOptions(judged, fit_on=other, json_output=True))
    assert code == 0
    assert report["simulation"]["fit"]["decode"]["error"]["median"] < 0.01
    ratios = {
        (one["class_name"], one["measure"]): one["simulated"] / one["real"]
        for one in report["simulation"]["comparisons"]
    }
    assert len(ratios) == 30
    assert {key: ratio for key, ratio in ratios.items() if abs(ratio - 1.0) > 0.05} == {}


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(tmp_path / "run", colocated(learns_costs=True), 1)
    assert replay(ReplayOptions(folder, outstanding=("be=4",))) == 0
    output = capsys.readouterr().out
    assert "with the component" in output
    assert "fitted to this very run" in output
    assert "ttft p90, s" in output


def test_the_table_names_the_costs_and_the_workers_that_were_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded(tmp_path / "run", colocated(2, topology=Topology.ELASTIC, learns_costs=True), 1, num_requests=8)
    assert replay(ReplayOptions(folder)) == 0
    assert "elastic iterations fitted, error" in capsys.readouterr().out
    shape = ModelShape("tiny", 2, 64, 4, 4, 16, 256, 512, is_gated=False, ties_embeddings=True, dtype="float32")
    costs = LinearCoefficients(base_s=0.002, prompt_token_s=1e-5, decode_s=1e-4)
    profile = tmp_path / "here.json"
    profile.write_text(json.dumps(MachineProfile(shape, costs, LinkModel(0.0, 1e9)).as_fields()))
    options = ReplayOptions(folder, costs=f"fitted:{profile}")
    _, report = run_json(capsys, replace(options, json_output=True))
    assert report["simulation"]["costs_from"] == f"fitted:{profile}; links from this very run"
    assert report["simulation"]["fit"]["decode"] is None


def test_a_difference_is_shown_and_makes_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    random_run(RecordingConfig(folder=str(tmp_path), commands=True), 0, num_requests=5)
    monkeypatch.setattr(DecodeLogic, "on_event", lambda self, event, now: [])
    assert replay(ReplayOptions(tmp_path, component="decode-0")) == 1
    output = capsys.readouterr().out
    assert "differs after" in output
    assert "WorkerRegistered" in output


def test_parts_of_other_nodes_are_of_the_same_run_with_times_of_the_first_one_s_clock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded(tmp_path / "run", disaggregated(2, 2, learns_costs=True), 1)
    _, alone = replay_folder(folder)
    part = folder / "node-1.1"
    part.mkdir()
    moved = {"decode-1.0.recording", "prefill-1.0.recording"}
    for name in moved:
        (folder / name).rename(part / name)
    about = RecordedPart(node="node-1", hostname="host1", address="10.0.0.2", clock_ahead_s=1000.0, is_whole=False)
    (part / PART_FILE).write_bytes(msgspec.json.encode(about))
    code, report = run_json(capsys, ReplayOptions(folder, is_simulated=False, json_output=True))
    assert code == 0
    assert {one["file"] for one in report["rooms"] if one.get("node") == "node-1"} == {
        f"node-1.1/{one}" for one in moved
    }
    assert replay(ReplayOptions(folder, is_simulated=False)) == 0
    assert "node-1 on host1 (10.0.0.2) was lost or its end is missing" in capsys.readouterr().out
    _, run = replay_folder(folder)
    times = {key: one.times_in_order[-1] for key, one in alone.requests.items()}
    later = {key: one.times_in_order[-1] - times[key] for key, one in run.requests.items()}
    assert {round(seconds) for seconds in later.values()} == {0, 1000}
    (part / PART_FILE).write_bytes(b"{}")
    with pytest.raises(RecordingError, match=r"part\.json is damaged"):
        replay_folder(folder)


def test_an_unknown_component_lists_those_that_there_are(tmp_path: Path) -> None:
    random_run(RecordingConfig(folder=str(tmp_path)), 0, num_requests=1)
    with pytest.raises(ConfigError, match="--component gateway-0: recorded are decode-0, decode-1, pool-0"):
        replay(ReplayOptions(tmp_path, component="gateway-0"))


def test_a_run_without_its_file_has_decisions_but_no_simulation(tmp_path: Path) -> None:
    random_run(RecordingConfig(folder=str(tmp_path)), 0, num_requests=5)
    assert replay(ReplayOptions(tmp_path, is_simulated=False)) == 0
    with pytest.raises(RecordingError, match=r"run\.json cannot be read"):
        replay(ReplayOptions(tmp_path))


@each("value", ["be", "be=", "be=0", "be=-1", "xy=4", "=4"])
def test_outstanding_is_class_and_number(value: str) -> None:
    with pytest.raises(ConfigError, match="must be rt=N or be=N"):
        parse_outstanding([value])
