"""Recorded decisions are made again, whatever happened; a different one is found."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alignedserve.config.sections import RecordingConfig, SchedulingConfig, Topology
from alignedserve.core.request import SamplingParams, Slo
from alignedserve.process.recording import RecordReader
from decode_worker.logic import DecodeLogic
from lab.replay.component_replay import ComponentReplay, recordings_in
from tests.harnesses.clusters.in_process import running, small_config
from tests.harnesses.simulation import colocated, disaggregated, mixed_workload, timed, workload_of
from tests.replay.recorded import PROMPT_TOKEN, random_run, recorded_simulation, replays

pytestmark = pytest.mark.slow


def differing(replayed: list[ComponentReplay]) -> list[str]:
    return [one.path.name for one in replayed if one.difference is not None]


@pytest.mark.parametrize(("seed", "tokens"), [(0, False), (1, False), (2, True), (3, False)])
def test_random_histories_replay(tmp_path: Path, seed: int, tokens: bool) -> None:
    """With workers and pools that die, clients that leave, and tokens that end answers; redacted or not."""
    random_run(RecordingConfig(folder=str(tmp_path), tokens=tokens), seed)
    replayed = replays(tmp_path)
    assert {one.name for one in replayed} == {"router", "pool-0", "prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert differing(replayed) == []
    assert {one.ending for one in replayed} == {"closed"}
    assert sum(one.num_equal for one in replayed) > 1000


@pytest.mark.parametrize("topology", Topology)
async def test_components_that_serve_replay(tmp_path: Path, topology: Topology) -> None:
    """Real sockets, real iterations."""
    recording = RecordingConfig(folder=str(tmp_path / "run"))
    config = small_config(tmp_path / "model", topology=topology, recording=recording)
    async with running(config, tmp_path) as cluster:
        for number in range(4):
            sampling = SamplingParams(max_tokens=5 + number, num_logprobs=1, num_prompt_logprobs=1)
            await cluster.gateway.generate(list(range(10, 30 + number)), sampling)
    replayed = replays(tmp_path / "run")
    assert len(replayed) == (4 if topology.is_separate else 2)
    assert differing(replayed) == []


@pytest.mark.parametrize("policy", ["fcfs", "sarathi", "aligned_slo"])
def test_simulated_colocated_workers_replay(tmp_path: Path, policy: str) -> None:
    config = colocated(policy=policy, worker_blocks=60, learns_costs=True)
    recorded_simulation(tmp_path, config, mixed_workload(40, 8.0))
    replayed = replays(tmp_path)
    assert [one.name for one in replayed] == ["router", "worker-0"]
    assert differing(replayed) == []


@pytest.mark.parametrize("topology", [Topology.ELASTIC, Topology.DISAGGREGATED])
def test_passes_that_stop_between_layers_replay(tmp_path: Path, topology: Topology) -> None:
    config = disaggregated(2, 2) if topology.is_separate else colocated(2, topology=topology)
    scheduling = SchedulingConfig(policy="aligned_slo", yield_between_layers=True)
    cluster = msgspec.structs.replace(config.cluster, scheduling=scheduling)
    layout = replace(config.layout, num_layers=4, head_dim=1)  # as many bytes
    config = replace(config, cluster=cluster, layout=layout, learns_costs=True)
    result = recorded_simulation(tmp_path, config, mixed_workload(60, 6.0))
    # Separate decode workers tell of their iterations alone, and stop for nothing.
    assert (result.iteration_log.num_yields > 3) is not topology.is_separate
    assert differing(replays(tmp_path)) == []


def test_simulated_elastic_workers_replay(tmp_path: Path) -> None:
    """One has a long prompt while the other gets all short ones, which fill its time."""
    config = colocated(2, policy="aligned_slo", topology=Topology.ELASTIC, learns_costs=True)
    tight = Slo(ttft_s=2.0, tpot_s=0.02)
    long, short = timed(0.0, 400, 60, slo=tight), [timed(0.01 * number, 10, 150, slo=tight) for number in range(1, 8)]
    result = recorded_simulation(tmp_path, config, workload_of(long, *short))
    assert result.num_handoffs_verified > 0
    replayed = replays(tmp_path)
    assert [one.name for one in replayed] == ["router", "worker-0", "worker-1"]
    assert differing(replayed) == []


def test_a_simulated_cluster_replays(tmp_path: Path) -> None:
    recorded_simulation(tmp_path, disaggregated(2, 2), mixed_workload(60, 10.0))
    replayed = replays(tmp_path)
    assert {one.name for one in replayed} == {"router", "prefill-0", "prefill-1", "decode-0", "decode-1"}
    assert differing(replayed) == []


def test_no_token_is_in_a_redacted_recording(tmp_path: Path) -> None:
    random_run(RecordingConfig(folder=str(tmp_path / "without"), commands=True), 5, num_requests=12)
    random_run(RecordingConfig(folder=str(tmp_path / "with"), tokens=True), 5, num_requests=12)
    token = PROMPT_TOKEN.to_bytes(2, "big")
    found = {
        folder: sum(path.read_bytes().count(b"\xcd" + token) for path in recordings_in(tmp_path / folder))
        for folder in ("without", "with")
    }
    assert found["without"] == 0
    assert found["with"] > 100


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    random_run(RecordingConfig(folder=str(folder)), 0, num_requests=1)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in recordings_in(folder)} == {0o600}


def test_a_changed_decision_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code has changed since: a decode worker leaves one command out."""
    random_run(RecordingConfig(folder=str(tmp_path), commands=True), 0)
    decide = DecodeLogic.on_event
    numbers = iter(range(30, 0, -1))

    def changed(self: DecodeLogic, event: Any, now: float) -> list[Any]:
        commands = [*decide(self, event, now)]
        return commands[1:] if commands and next(numbers, None) == 1 else commands

    monkeypatch.setattr(DecodeLogic, "on_event", changed)
    replayed = replays(tmp_path)
    assert differing(replayed) == ["decode-0.0.recording"]
    difference = next(one.difference for one in replayed if one.difference is not None)
    assert difference.number >= 29
    assert difference.expected[1:] == difference.got


def test_a_changed_event_is_found(tmp_path: Path) -> None:
    """One event of the recording is another one than what was decided upon."""
    random_run(RecordingConfig(folder=str(tmp_path)), 0)
    path = tmp_path / "router.0.recording"
    reader = RecordReader(path)
    frames = list(reader.decisions())
    submitted = next(index for index, (_, one) in enumerate(frames) if b"SubmitRequest" in bytes(one.event))
    start, end = frames[submitted][0], frames[submitted + 1][0]
    content = path.read_bytes()
    path.write_bytes(content[:start] + content[end:])
    one = ComponentReplay(path)
    assert list(one.decided())
    assert one.difference is not None
    assert one.difference.number >= submitted


def test_a_logic_that_breaks_now_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_run(RecordingConfig(folder=str(tmp_path)), 0, num_requests=3)

    def broken(self: DecodeLogic, event: Any, now: float) -> list[Any]:
        raise KeyError("r1")

    monkeypatch.setattr(DecodeLogic, "on_event", broken)
    difference = replays(tmp_path)[0].difference
    assert difference is not None
    assert difference.got == "KeyError: 'r1'"
