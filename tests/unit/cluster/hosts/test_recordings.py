"""Recordings of other nodes are copied into the folder of the run while they are written. Without Ray."""

import json
import random
import secrets
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from typing_extensions import override

from alignedserve.cluster import recording_folder as recorded_parts
from alignedserve.cluster.hosts import recordings
from alignedserve.cluster.hosts.recordings import RecordedNode, Recordings, clock_ahead_s
from alignedserve.cluster.nodes.ray_nodes import RayNode
from alignedserve.cluster.recording_folder import (
    MAX_PART_BYTES,
    parts_folder,
    recording_into,
    remove_unserved,
    write_run_file,
)
from alignedserve.config.sections import ClusterConfig, ModelSectionConfig
from alignedserve.process.recording import PART_FILE, RecordedPart, RunMetadata
from alignedserve.runtime.model.served_model import resolve_model
from tests.support.waiting import holds

PART = RecordedPart(node="node-1", hostname="host1", address="10.0.0.2", clock_ahead_s=2.5, is_whole=False)


class Agent:
    """Calls what the agent of a node would, on a folder of this process; some calls find it busy."""

    def __init__(self, private: Path, rng: random.Random | None = None) -> None:
        self.folder = parts_folder(private)
        self.folder.mkdir(parents=True)
        self.rng = rng

    def __call__(self, method: str, *arguments: Any) -> Any:
        if self.rng is not None and self.rng.random() < 0.1:
            raise TimeoutError("busy")
        match method:
            case "recordings":
                return recorded_parts.sizes(self.folder)
            case "read_recording":
                return recorded_parts.read_part(self.folder, *arguments)
            case "remove_recordings":
                return recorded_parts.remove(self.folder)
            case "clock_s":
                return time.monotonic()
        raise AssertionError(method)

    def write(self, name: str, content: bytes) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(content)


def is_whole(folder: Path) -> bool:
    return bool(json.loads((folder / PART_FILE).read_bytes())["is_whole"])


@pytest.mark.parametrize("seed", range(10))
def test_over_random_histories_every_byte_is_copied_once(tmp_path: Path, seed: int) -> None:
    """Processes write, agents are busy, and drivers are replaced meanwhile."""
    rng = random.Random(seed)
    agent = Agent(tmp_path / "private", rng)
    written: dict[str, bytes] = {}

    def tried(do: Any) -> None:
        while True:
            try:
                do()
                return
            except TimeoutError:
                continue

    copied = tmp_path / "run"
    node = RecordedNode(agent, copied, PART)
    for _ in range(60):
        name = f"{rng.choice(('decode-1', 'router', 'pool-0'))}.{rng.randrange(2)}.recording"
        content = rng.randbytes(rng.randrange(2 * MAX_PART_BYTES))
        agent.write(name, content)
        written[name] = written.get(name, b"") + content
        if rng.random() < 0.3:
            node = RecordedNode(agent, copied, PART)
        if rng.random() < 0.3:
            tried(lambda: node.copy(time.monotonic() + rng.choice((0.0, 60.0))))  # noqa: B023
    assert not is_whole(copied)
    tried(lambda: node.finish(time.monotonic() + 60.0))
    assert {path.name: path.read_bytes() for path in copied.glob("*.recording")} == written
    assert is_whole(copied)
    assert not agent.folder.exists()
    assert {path.stat().st_mode & 0o777 for path in copied.iterdir()} == {0o600}


@pytest.mark.parametrize("name", ["../x.0.recording", "decode-1.recording", "run.json", "decode-1.0.recording/x", ""])
def test_what_is_no_recording_is_neither_read_nor_written(tmp_path: Path, name: str) -> None:
    asked: list[object] = []

    def ask(method: str, *arguments: object) -> Any:
        asked.append(method)
        return {name: 5} if method == "recordings" else b"12345"

    assert RecordedNode(ask, tmp_path / "run", PART).copy(time.monotonic() + 1.0)
    assert asked == ["recordings"]
    (tmp_path / "x.0.recording").touch()
    assert recorded_parts.read_part(tmp_path / "run", name, 0) == b""


@pytest.mark.parametrize("content", [b"", bytes(MAX_PART_BYTES + 1)])
def test_an_answer_that_cannot_be_a_part_ends_the_copy_for_now(tmp_path: Path, content: bytes) -> None:
    def ask(method: str, *arguments: object) -> Any:
        return {"router.0.recording": 1 << 40} if method == "recordings" else content

    node = RecordedNode(ask, tmp_path / "run", PART)
    assert not node.copy(time.monotonic() + 1.0)
    assert (tmp_path / "run" / "router.0.recording").stat().st_size == 0


def test_of_several_answers_the_quickest_says_how_far_a_clock_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = iter([0.05, 0.001, 0.03, 0.05, 0.02])
    now = 5000.0

    def ask() -> float:
        nonlocal now
        now += next(delays)  # all of it on the way there
        return now - 1000.0

    monkeypatch.setattr(recordings, "time", SimpleNamespace(monotonic=lambda: now))
    assert clock_ahead_s(ask) == pytest.approx(1000.0, abs=0.001)


def member(agent: Agent, number: int, name: str) -> Any:
    methods = ("recordings", "read_recording", "remove_recordings", "clock_s")
    actor = SimpleNamespace(
        **{one: SimpleNamespace(remote=lambda *given, one=one: agent(one, *given)) for one in methods}
    )
    share = SimpleNamespace(is_head=number == 0)
    prepared = SimpleNamespace(share=share, folder=agent.folder.parent)
    node = RayNode(f"id-{number}", f"10.0.0.{number}", f"host-{number}", is_head=number == 0)
    return SimpleNamespace(name=name, ray_node=node, prepared=prepared, agent=SimpleNamespace(actor=actor))


async def test_nodes_that_do_not_answer_at_first_are_followed_once_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_silent = True

    def get(answer: object, timeout: float) -> object:
        if are_silent:
            raise TimeoutError
        return answer

    monkeypatch.setattr("alignedserve.cluster.hosts.recordings._PERIOD_S", 0.01)
    monkeypatch.setattr(ray, "get", get)
    run = tmp_path / "run"
    run.mkdir()
    recordings = Recordings(str(run))
    for number in (1, 2):
        agent = Agent(tmp_path / f"c-{number}")
        recordings.follow(member(agent, number, f"node-{number}"))
        agent.write("pool-0.0.recording", b"begin")
    recordings.forget("node-2")
    assert list(run.iterdir()) == []
    are_silent = False
    await holds(lambda: [path.read_bytes() for path in run.glob("*/*.recording")] == [b"begin"])
    recordings.close(is_end=True)
    assert [(path.name, is_whole(path)) for path in run.iterdir()] == [("node-1.1", True)]


async def test_nodes_are_followed_but_the_head_and_what_is_lost_stays_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.cluster.hosts.recordings._PERIOD_S", 0.01)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    agents = [Agent(tmp_path / name) for name in ("c-0", "c-1", "c-7")]
    run = tmp_path / "run"
    run.mkdir()
    recordings = Recordings(str(run))
    for number, name in enumerate(("node-0", "node-1", "node-2")):
        recordings.follow(member(agents[number], number, name))
        agents[number].write(f"decode-{number}.0.recording", b"begin")
    await holds(lambda: len(list(run.glob("*/*.recording"))) == 2)
    await holds(lambda: all(path.read_bytes() for path in run.glob("*/*.recording")))
    recordings.forget("node-2")
    for agent in agents:
        agent.write("pool-0.0.recording", b"end")
    recordings.close(is_end=True)
    recordings.close(is_end=True)
    assert sorted(path.name for path in run.iterdir()) == ["node-1.1", "node-2.7"]
    assert (is_whole(run / "node-1.1"), is_whole(run / "node-2.7")) == (True, False)
    assert (run / "node-1.1" / "pool-0.0.recording").read_bytes() == b"end"
    assert agents[2].folder.exists()


class FullDisk(RecordedNode):
    """Copies nothing while the disk is full."""

    is_full = True

    @override
    def copy(self, ends_s: float) -> bool:
        if self.is_full:
            raise OSError("no space")
        return True


def test_a_disk_that_stays_full_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    node, recordings = FullDisk(Agent(tmp_path / "private"), tmp_path / "run", PART), Recordings(None)

    def said(is_full: bool) -> int:
        node.is_full = is_full
        recordings._perform("node-1", node.lock, lambda: node.copy(0.0))
        return len(caplog.records)

    assert [said(is_full) for is_full in (True, True, False, True, True)] == [1, 1, 1, 2, 2]
    assert "no space" in caplog.text


def test_all_nodes_share_the_time_that_the_end_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []
    recordings = Recordings(None)
    for name in ("node-1", "node-2"):
        node = RecordedNode(Agent(tmp_path / f"{name}-private"), tmp_path / name, PART)
        monkeypatch.setattr(node, "finish", ends.append)
        recordings._nodes[name] = node
    recordings.close(is_end=True)
    assert len(ends) == 2
    assert len(set(ends)) == 1


def test_a_start_that_failed_leaves_an_empty_folder_to_the_next_one_and_no_file_of_others_is_removed(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    served = resolve_model(ModelSectionConfig())
    config = recording_into(ClusterConfig(), run)
    for _ in range(2):
        write_run_file(RunMetadata(config=config, layout=served.block_layout(16)))
        (run / "router.0.recording").touch()
        RecordedNode(Agent(tmp_path / secrets.token_hex(4)), run / "node-1.1", PART)
        (run / "node-1.1" / "decode-1.0.recording").touch()
        remove_unserved(run)
        assert list(run.iterdir()) == []
    (run / "node-1.1").mkdir()
    for name in ("notes.txt", "node-1.1/x.recording"):
        (run / name).touch()
    remove_unserved(run)
    remove_unserved(tmp_path / "none")
    assert sorted(path.name for path in run.rglob("*")) == ["node-1.1", "notes.txt", "x.recording"]


def test_where_nothing_is_recorded_nothing_is_copied() -> None:
    recordings = Recordings(None)
    recordings.follow(SimpleNamespace())  # type: ignore[arg-type]
    recordings.finish("node-1")
    recordings.close(is_end=True)
