"""The agent of a node: what drivers hand over to the next one, and the end of actors that have no driver."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cluster.nodes.agent import KeptState, NodeAgent
from tests.support.waiting import holds

MODULE = NodeAgent.__module__


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    actors: list[Any] = []
    monkeypatch.setattr(f"{MODULE}.end_actors", actors.extend)
    monkeypatch.setattr(f"{MODULE}._own_handle", lambda: "agent")
    monkeypatch.setattr(f"{MODULE}.release", lambda folder: None)  # it would ask Ray, and start one
    monkeypatch.setattr(f"{MODULE}._WATCH_S", 0.01)
    return actors


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ended: list[Any]) -> Iterator[NodeAgent]:
    monkeypatch.setattr(f"{MODULE}.make_run_folder", lambda name: tmp_path)
    monkeypatch.setattr(f"{MODULE}.start_sweeper", lambda folder, raylet_pid: None)
    made = NodeAgent("c-0")
    yield made
    made._patience_s = 0.0  # its thread would end, and do so, in another test
    ends_s = time.monotonic() + 30.0
    while "agent" not in ended:
        assert time.monotonic() < ends_s
        time.sleep(0.005)


def test_a_agent_without_a_driver_keeps_nothing_and_ends_nothing(agent: NodeAgent, ended: list[Any]) -> None:
    assert agent.kept() is None
    assert ended == []


def test_the_latest_state_is_kept_whichever_comes_last(agent: NodeAgent) -> None:
    for number in (1, 3, 2):
        agent.keep(number, b"%d" % number, [], 60.0)
    kept = agent.kept()
    assert kept is not None
    assert kept._replace(age_s=0.0) == KeptState(3, b"3", 0.0)
    assert 0.0 <= kept.age_s < 60.0


def test_a_agent_that_hears_of_its_driver_says_whether_it_has_the_state(agent: NodeAgent) -> None:
    assert not agent.hear(1)
    agent.keep(1, b"1", [], 60.0)
    agent._heard_s -= 30.0
    assert not agent.hear(2)
    assert agent.hear(1)
    kept = agent.kept()
    assert kept is not None
    assert kept.age_s < 30.0


async def test_actors_without_a_driver_are_ended_and_the_agent_last(agent: NodeAgent, ended: list[Any]) -> None:
    agent.keep(1, b"", ["router"], 60.0)
    agent.keep(2, b"", ["router", "decode-0"], 0.0)
    await holds(lambda: ended == ["router", "decode-0", "agent"])


async def test_a_agent_whose_driver_died_before_it_served_ends(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, ended: list[Any]
) -> None:
    monkeypatch.setattr(f"{MODULE}._UNUSED_S", 0.0)
    request.getfixturevalue("agent")
    await holds(lambda: ended == ["agent"])
