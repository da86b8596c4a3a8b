"""Workers that are restarted one after the other: what is drained when, and when the next worker's turn is."""

from collections.abc import Callable, Sequence

import pytest

from alignedserve.cluster.deployments.orders import AdminRequest, Answer, DeploymentReport, OrderRefused, RestartWorkers
from alignedserve.cluster.desired import (
    RETURN_S,
    Act,
    ClusterStep,
    RollingRestart,
    SeenCluster,
    SeenNode,
    WantedCluster,
    reconcile,
)
from alignedserve.cluster.serving_cluster import ServingCluster
from alignedserve.core.errors import ResourceError

DEPLOYMENTS = (
    DeploymentReport("", "first", "", "serving", 0, workers=("decode-0", "decode-1")),
    DeploymentReport("m2", "second", "", "serving", 0, workers=("decode-0.m2",)),
)


class Rolling:
    """A restart of two workers, and what they report."""

    def __init__(self) -> None:
        within_s = dict.fromkeys(("decode-0", "decode-1"), 60.0)
        self.wanted = WantedCluster(restart=RollingRestart("x", list(within_s), within_s))
        self.registrations = {"decode-0": "a-1", "decode-1": "a-2"}
        self.routers = {"router"}
        self.workers: tuple[str, ...] = ("decode-0", "decode-1")

    def look(self, drained: Sequence[str], now: float) -> list[ClusterStep]:
        """Return the steps. `drained`: workers with nothing left."""
        host = ("h", "10.0.0.1")
        seen = SeenCluster(
            {"id": host},
            {"id": SeenNode("node-0", host, self.workers)},
            left=dict.fromkeys(drained, 0),
            registrations=self.registrations,
            routers=self.routers,
        )
        return reconcile(self.wanted, seen, now)


@pytest.fixture
def rolling() -> Rolling:
    return Rolling()


def say(text: str) -> ClusterStep:
    return ClusterStep(Act.SAY, "x", text)


def test_a_worker_that_is_lost_while_it_drains_ends_the_restart(rolling: Rolling) -> None:
    assert rolling.look([], 1.0) == [say("decode-0 drains")]
    rolling.wanted.drains.clear()  # as its node is lost
    assert rolling.look([], 2.0) == [
        ClusterStep(Act.REFUSE, "x", "decode-0 drains no more; the others were left as they are")
    ]
    assert rolling.wanted.restart is None


def test_the_next_one_drains_once_the_former_is_registered_anew(rolling: Rolling) -> None:
    assert rolling.look([], 1.0) == [say("decode-0 drains")]
    assert rolling.wanted.due_to_move(61.0) == ("decode-0",)
    assert rolling.look([], 1.0) == []
    assert rolling.look(["decode-0"], 1.0) == [ClusterStep(Act.RESTART, "decode-0")]
    assert rolling.wanted.drains == {}
    assert rolling.look([], 2.0) == []  # the former process is still registered
    del rolling.registrations["decode-0"]
    assert rolling.look([], 3.0) == []
    rolling.registrations["decode-0"] = "a-3"
    assert rolling.look([], 4.0) == [say("decode-0 serves again after 3.0 s"), say("decode-1 drains")]
    assert rolling.look(["decode-1"], 5.0) == [ClusterStep(Act.RESTART, "decode-1")]
    rolling.registrations["decode-1"] = "a-4"
    served = say("decode-1 serves again after 1.0 s")
    assert rolling.look([], 6.0) == [
        served,
        ClusterStep(Act.DONE, "x", "2 workers were restarted, one after the other."),
    ]


def test_one_that_does_not_return_ends_the_restart(rolling: Rolling) -> None:
    rolling.look([], 0.0)
    rolling.look(["decode-0"], 1.0)
    assert rolling.look([], RETURN_S) == []
    (step,) = rolling.look([], RETURN_S + 2.0)
    assert step == ClusterStep(Act.REFUSE, "x", "decode-0 does not serve again; the others were left as they are")
    assert rolling.wanted.drains == {}


def test_one_whose_model_ends_meanwhile_is_passed_over() -> None:
    for is_asked in (False, True):  # before its end, or not
        rolling = Rolling()
        rolling.look([], 0.0)
        if is_asked:
            rolling.look(["decode-0"], 1.0)
        rolling.routers.clear()
        assert rolling.look([], 2.0) == [
            say("decode-0 is gone with its model"),
            ClusterStep(Act.DONE, "x", "No worker was restarted: their models have ended."),
        ]
        assert rolling.wanted.drains == {}


def test_one_that_is_gone_before_its_turn_is_passed_over(rolling: Rolling) -> None:
    rolling.workers = ("decode-1",)
    assert rolling.look([], 0.0) == [say("decode-1 drains")]


def test_a_drain_that_lasts_is_no_failure(rolling: Rolling) -> None:
    assert rolling.wanted.restart is not None
    rolling.wanted.restart.within_s = {"decode-0": 100.0 * RETURN_S}
    rolling.look([], 0.0)
    assert rolling.look([], 10.0 * RETURN_S) == []


def test_the_next_driver_goes_on_with_the_worker_that_drains(rolling: Rolling) -> None:
    rolling.look([], 100.0)
    rolling.wanted.resume(1.0)  # the clock of a host that was started anew
    assert rolling.look([], 2.0) == []
    assert rolling.look(["decode-0"], 3.0) == [ClusterStep(Act.RESTART, "decode-0")]


# --- orders


def test_an_order_is_begun_once_and_another_one_is_refused_meanwhile(cluster: ServingCluster) -> None:
    wishes, wanted = cluster._wishes, cluster._wanted
    wishes.restart("1", RestartWorkers(), DEPLOYMENTS)
    assert wanted.restart is not None
    assert wanted.restart.waiting == ["decode-0", "decode-1", "decode-0.m2"]
    with pytest.raises(ResourceError, match="the workers are being restarted already"):
        wishes.restart("2", RestartWorkers(), DEPLOYMENTS)
    assert wanted.restart.order_id == "1"


def test_the_only_worker_of_its_kind_is_not_waited_for(cluster: ServingCluster) -> None:
    cluster._wishes.restart("1", RestartWorkers(), DEPLOYMENTS)
    assert cluster._wanted.restart is not None
    assert cluster._wanted.restart.within_s == {"decode-0": 60.0, "decode-1": 60.0, "decode-0.m2": 0.0}


def test_an_order_that_a_former_driver_has_begun_is_not_begun_again(
    cluster: ServingCluster, answered: Callable[[AdminRequest], Answer | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster._drain_watch, "look", lambda actors: None)
    cluster._wanted.restart = RollingRestart("x", [], {}, "decode-1", has_drained=True, since_s=float("inf"))
    cluster._actors["node-0"] = {"router": None}
    assert answered(RestartWorkers()) is None
    assert cluster._wanted.restart.current == "decode-1"


@pytest.mark.parametrize(
    ("order", "problem"),
    [(RestartWorkers("third"), "third"), (RestartWorkers(drains_within_s=-1.0), "number of seconds")],
)
def test_what_cannot_be_restarted_is_said(
    answered: Callable[[AdminRequest], Answer | None], order: RestartWorkers, problem: str
) -> None:
    refused = answered(order)
    assert isinstance(refused, OrderRefused)
    assert problem in refused.reason


def test_workers_that_drain_are_left_alone(cluster: ServingCluster) -> None:
    cluster._wishes._end_later("decode-0", 60.0)
    cluster._wishes.restart("1", RestartWorkers("first"), DEPLOYMENTS)
    assert cluster._wanted.restart is not None
    assert cluster._wanted.restart.waiting == ["decode-1"]
