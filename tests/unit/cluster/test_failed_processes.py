"""Processes that do not serve: when they are started again, and what is said of them. Without Ray."""

import math
import random
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from typing_extensions import override

from alignedserve.cluster import watchdog
from alignedserve.cluster.desired import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SETTLED_S,
    Act,
    ClusterStep,
    Failures,
    Health,
    ProcessState,
    SeenCluster,
    WantedCluster,
    reconcile,
)
from alignedserve.cluster.hosts.record import ActorRecord, NodeRecord
from alignedserve.cluster.serving_cluster import ServingCluster
from alignedserve.core.errors import ResourceError
from tests.support.marks import each

UP, STARTING, ENDED = Health(ProcessState.UP), Health(), Health(ProcessState.ENDED)
FAILED = Health(ProcessState.FAILED, "no room for its cache")
DEAD = Health(ProcessState.DEAD, "MemoryError: no memory")


class Died(ActorDiedError):
    """Error as Ray raises it for one in a constructor: with the traceback of that."""

    def __init__(self) -> None:
        pass

    @override
    def __str__(self) -> str:
        return "The actor died because of an error raised in its creation task\nMemoryError: no memory\n"


class FakeActor:
    """Stands for an actor and for its calls, of which each is the actor itself."""

    @property
    def failure(self) -> "FakeActor":
        return self

    def remote(self) -> "FakeActor":
        return self


def failures(restarts: Failures, since: float, count: int) -> list[float]:
    """Let every start fail; return the times at which the process was started again."""
    times: list[float] = []
    now = since
    while len(times) < count:
        if restarts.look({"decode-1": FAILED}, now):
            times.append(now)
            assert restarts.look({"decode-1": STARTING}, now) == []
            assert "starts again" in restarts.problems["decode-1"]
        now += 0.5
    return times


def test_each_failed_start_doubles_the_pause() -> None:
    times = failures(Failures(), 0.0, 8)
    pauses = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert pauses == pytest.approx([5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 160.0, 160.0], abs=1.0)
    assert (FIRST_PAUSE_S, LONGEST_PAUSE_S) == (5.0, 160.0)


def test_a_process_is_failing_from_its_second_failed_start_until_it_is_up() -> None:
    restarts = Failures()
    (first,) = failures(restarts, 0.0, 1)
    assert restarts.failing == set()
    restarts.look({"decode-1": FAILED}, first)
    assert restarts.failing == {"decode-1"}
    restarts.look({"decode-1": STARTING}, first + 10.0)
    assert restarts.failing == {"decode-1"}
    restarts.look({"decode-1": UP}, first + 11.0)
    assert restarts.failing == set()


def test_thousands_of_failed_starts_keep_the_longest_pause() -> None:
    restarts, now = Failures(), 0.0
    for _ in range(3000):
        assert restarts.look({"decode-1": FAILED}, now) == []
        now += LONGEST_PAUSE_S
        assert restarts.look({"decode-1": FAILED}, now) == ["decode-1"]
    assert restarts.look({"decode-1": FAILED}, now) == []
    assert restarts.problems["decode-1"].startswith("3001 failed starts, the next 160 s after the last")


@pytest.mark.parametrize(("up_s", "is_first"), [(SETTLED_S, True), (SETTLED_S / 2, False)])
def test_a_process_that_has_served_for_a_minute_fails_for_the_first_time(up_s: float, is_first: bool) -> None:
    restarts = Failures()
    last = failures(restarts, 0.0, 4)[-1]
    for now in (last, last + up_s):
        assert restarts.look({"decode-1": UP}, now) == []
        assert restarts.problems == {}
    failed_s = last + up_s + 1.0
    assert restarts.look({"decode-1": DEAD}, failed_s) == []
    assert bool(restarts.look({"decode-1": DEAD}, failed_s + FIRST_PAUSE_S)) is is_first


def test_one_that_has_ended_is_ray_s_to_start_again_and_one_that_is_gone_is_forgotten() -> None:
    restarts = Failures()
    assert restarts.look({"pool-1": ENDED}, 0.0) == []
    assert restarts.problems == {"pool-1": "its process has ended and starts again"}
    assert restarts.look({"pool-1": ENDED}, 1000.0) == []
    restarts.look({"pool-1": FAILED}, 1000.0)
    assert restarts.problems == {"pool-1": "1 failed start, the next 5 s after the last: no room for its cache"}
    restarts.look({}, 1001.0)
    assert restarts.problems == {}


@each("seed", range(20))
def test_over_random_histories_failing_processes_are_named_and_started_again_and_others_left_alone(seed: int) -> None:
    rng = random.Random(seed)
    restarts, now = Failures(), 0.0
    healths: dict[str, Health] = {}
    failing_s: dict[str, float] = {}  # since when a process fails without having been started again
    for _ in range(400):
        now += rng.uniform(0.1, 20.0)
        name = f"decode-{rng.randrange(4)}"
        if name in healths and rng.random() < 0.1:
            del healths[name]
            failing_s.pop(name, None)
        else:
            healths[name] = rng.choice((UP, STARTING, ENDED, FAILED, DEAD))
        for one, health in healths.items():
            is_failing = health in (FAILED, DEAD)
            failing_s = {**failing_s, one: failing_s.get(one, now)} if is_failing else failing_s
            if not is_failing:
                failing_s.pop(one, None)
        for one in restarts.look(healths, now):
            assert now - failing_s[one] >= FIRST_PAUSE_S
            healths[one] = STARTING
            del failing_s[one]
        assert all(now - since_s <= LONGEST_PAUSE_S for since_s in failing_s.values())
        named = {one for one, health in healths.items() if health in (FAILED, DEAD, ENDED)}
        assert named <= restarts.problems.keys() <= healths.keys()
        assert not any(healths[one] == UP for one in restarts.problems)


def test_a_start_that_ray_refuses_is_tried_again_later(
    cluster: ServingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    healths: dict[str, Health] = {"decode-1": DEAD, "decode-2": STARTING}
    wanted, now, tried = WantedCluster(), 0.0, list[float]()
    monkeypatch.setattr(cluster, "_wanted", wanted)

    def start_again(name: str) -> None:
        tried.append(now)
        if len(tried) == 1:
            raise ValueError(f"the name {name} is taken")
        healths[name] = STARTING

    monkeypatch.setattr(cluster, "_start_again", start_again)
    monkeypatch.setattr(cluster, "healths", lambda: healths)
    monkeypatch.setattr(cluster, "actors", lambda: dict(healths))
    news: list[str] = []
    while len(tried) < 2:
        for step in reconcile(wanted, SeenCluster({}, {}, healths=healths), now):
            assert step == ClusterStep(Act.START_AGAIN, "decode-1")
            cluster._perform(step)
        news += [text for text in wanted.failures.problems.values() if text not in news]
        now += 1.0
    assert tried == [5.0, 16.0]
    assert [one.split(",")[0] for one in news] == [
        *("1 failed start", "starts again after 1 failed start: MemoryError: no memory"),
        *("2 failed starts", "starts again after 2 failed starts: MemoryError: no memory"),
    ]
    assert cluster._are_awaited(["decode-2"])
    assert not cluster._are_awaited(["decode-1"])
    healths["decode-1"] = UP
    assert reconcile(wanted, SeenCluster({}, {}, healths=healths), now) == []
    assert wanted.failures.problems == {}
    cluster._perform(ClusterStep(Act.START_AGAIN, "decode-9"))  # its node has just ended
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("answer", "health"),
    [
        (None, UP),
        (ResourceError("no room"), Health(ProcessState.FAILED, "no room")),
        (ResourceError("first\n" + "x" * 1000), Health(ProcessState.FAILED, "x" * 400)),
        (ResourceError(""), Health(ProcessState.FAILED, "ResourceError")),
        (Died(), DEAD),
    ],
)
def test_the_health_of_a_process_is_what_it_answers(
    monkeypatch: pytest.MonkeyPatch, answer: Exception | None, health: Health
) -> None:
    def get(reference: object) -> Exception | None:
        if isinstance(answer, ActorDiedError):
            raise answer
        return answer

    monkeypatch.setattr("alignedserve.cluster.watchdog.ray.get", get)
    assert watchdog._health_of("call") == health


def test_a_process_that_has_not_started_is_never_killed_as_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(watchdog, "has_ended", lambda call: call in answered)
    monkeypatch.setattr("alignedserve.cluster.watchdog.ray.get", lambda call: None)
    monkeypatch.setattr("alignedserve.cluster.watchdog.ray.kill", lambda actor, no_restart: killed.append(actor))
    answered: set[Any] = set()
    loading, serving = FakeActor(), FakeActor()
    watching = watchdog.Watchdog({"loading": loading, "serving": serving}, hang_timeout_s=3.0)
    for check in range(8):
        if check == 1:
            answered.add(serving)
        if check == 2:
            answered.clear()
        for name, watched in watching._actors.items():
            watching._check(name, watched)
    assert killed == [serving]
    assert watching.healths() == {"loading": STARTING, "serving": ENDED}


def test_a_silent_process_may_be_left_alone_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "has_ended", lambda call: False)
    monkeypatch.setattr("alignedserve.cluster.watchdog.ray.kill", lambda actor, no_restart: pytest.fail("killed"))
    watching = watchdog.Watchdog({"silent": FakeActor()}, hang_timeout_s=math.inf)
    (watched,) = watching._actors.values()
    watched.health = Health(ProcessState.UP)
    for _ in range(100):
        watching._check("silent", watched)
    assert watched.is_answering


def test_a_node_names_what_does_not_serve() -> None:
    failing = ActorRecord("decode-1", "2 threads", "1 failed start: no room")
    node = NodeRecord("node-1", "id", "10.0.0.2", "host1", actors=(ActorRecord("gateway-1"), failing))
    assert node.failing == (failing,)
    assert node.summary == "gateway-1, decode-1 (2 threads)\ndecode-1 does not serve: 1 failed start: no room"
