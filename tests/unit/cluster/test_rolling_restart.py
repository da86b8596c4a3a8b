"""Workers that are restarted one after the other: what is drained when, and when the next one's turn is."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from alignedserve.cluster.deployments.orders import (
    Answer,
    DeploymentReport,
    OrderDone,
    OrderRefused,
    Remark,
    RestartWorkers,
)
from alignedserve.cluster.draining.drains import Drains
from alignedserve.cluster.draining.rolling_restart import RETURN_S, RollingRestart, WorkerRestarts

DEPLOYMENTS = (
    DeploymentReport("", "first", "", "serving", 0, workers=("decode-0", "decode-1")),
    DeploymentReport("m2", "second", "", "serving", 0, workers=("decode-0.m2",)),
)


class WorkersMemory:
    """Workers that keep what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, float]] = []
        self.registrations: dict[str, str] = {"decode-0": "a-1", "decode-1": "a-2"}
        self.lost: set[str] = set()  # with their nodes
        self.gone: set[str] = set()  # with their models

    def begin_drain(self, name: str, within_s: float) -> None:
        self.asked.append(("drain", name, within_s))

    def is_draining(self, name: str) -> bool:
        return name not in self.lost

    def has_model(self, name: str) -> bool:
        return name not in self.gone

    def end_drain(self, name: str) -> None:
        self.asked.append(("end", name, 0.0))

    def restart(self, name: str) -> None:
        self.asked.append(("restart", name, 0.0))

    def registration(self, name: str) -> str | None:
        return self.registrations.get(name)


def rolling(workers: WorkersMemory, within_s: Callable[[str], float] = lambda name: 60.0) -> RollingRestart:
    return RollingRestart(("decode-0", "decode-1"), within_s, workers, lambda text: None)


def test_a_worker_that_is_lost_while_it_drains_ends_the_restart() -> None:
    workers = WorkersMemory()
    restart = rolling(workers)
    assert restart.look([], 1.0) is None
    workers.lost.add("decode-0")
    over = restart.look([], 2.0)
    assert over is not None
    assert (over.has_failed, over.text) == (True, "decode-0 drains no more; the others were left as they are")


def test_the_next_one_drains_once_the_former_is_registered_anew() -> None:
    workers = WorkersMemory()
    restart = rolling(workers)
    for drained in ([], [], ["decode-0"]):
        assert restart.look(drained, 1.0) is None
    assert workers.asked == [("drain", "decode-0", 60.0), ("restart", "decode-0", 0.0)]
    restart.look([], 2.0)  # the former process is still registered
    del workers.registrations["decode-0"]
    restart.look([], 3.0)
    assert len(workers.asked) == 2
    workers.registrations["decode-0"] = "a-3"
    restart.look([], 4.0)
    assert workers.asked[2:] == [("drain", "decode-1", 60.0)]
    restart.look(["decode-1"], 5.0)
    workers.registrations["decode-1"] = "a-4"
    over = restart.look([], 6.0)
    assert over is not None
    assert (over.text, over.has_failed) == ("2 workers were restarted, one after the other.", False)


def test_one_that_does_not_return_ends_the_restart() -> None:
    workers = WorkersMemory()
    restart = rolling(workers)
    restart.look([], 0.0)
    restart.look(["decode-0"], 1.0)
    assert restart.look([], RETURN_S) is None
    over = restart.look([], RETURN_S + 2.0)
    assert over is not None
    assert over.has_failed
    assert ("drain", "decode-1", 60.0) not in workers.asked


def test_one_whose_model_ends_meanwhile_is_passed_over() -> None:
    for is_asked in (False, True):  # before its end, or not
        workers = WorkersMemory()
        restart = rolling(workers)
        restart.look([], 0.0)
        if is_asked:
            restart.look(["decode-0"], 1.0)
        workers.gone.add("decode-0")
        assert restart.look([], 2.0) is None
        assert workers.asked[-2:] == [("end", "decode-0", 0.0), ("drain", "decode-1", 60.0)]
        workers.gone.add("decode-1")
        over = restart.look([], 3.0)
        assert over is not None
        assert (over.text, over.has_failed) == ("No worker was restarted: their models have ended.", False)


def test_a_model_that_sleeps_has_no_router() -> None:
    drains = Drains()
    made = restarts(drains, [])
    made.order("1", RestartWorkers(), DEPLOYMENTS)
    made.look([])
    assert [made.has_model(name) for name in ("decode-0", "decode-0.m2", "decode-0.m3")] == [True, True, False]
    made.end_drain("decode-0")
    assert drains.workers == ()


def test_a_drain_that_lasts_is_no_failure() -> None:
    restart = rolling(WorkersMemory())
    restart.look([], 0.0)
    assert restart.look([], 10.0 * RETURN_S) is None


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no call of an actor end."""
    monkeypatch.setattr("alignedserve.cluster.draining.rolling_restart.has_ended", lambda call: False)


def restarts(drains: Drains, answers: list[tuple[str, Answer]]) -> WorkerRestarts:
    asked = SimpleNamespace(remote=lambda: "a call")
    actors = dict.fromkeys(("router", "router.m2"), SimpleNamespace(registrations=asked))
    return WorkerRestarts(drains, lambda: actors, lambda order_id, answer: answers.append((order_id, answer)))


def test_an_order_is_begun_once_and_another_one_is_refused_meanwhile() -> None:
    drains, answers = Drains(), list[tuple[str, Answer]]()
    made = restarts(drains, answers)
    for _ in range(2):  # orders of hosts are read again until they are answered
        made.order("1", RestartWorkers(), DEPLOYMENTS)
        made.look([])
    made.order("2", RestartWorkers(), DEPLOYMENTS)
    assert answers == [("1", Remark("decode-0 drains")), ("2", OrderRefused("the workers are being restarted already"))]
    assert drains.workers == ("decode-0",)
    assert [made.takes(name) for name in ("decode-0", "decode-1", "decode-0.m2", "decode-7")] == [True] * 3 + [False]


def test_the_only_worker_of_its_kind_is_not_waited_for() -> None:
    drains, answers = Drains(), list[tuple[str, Answer]]()
    restarts_of_second = restarts(drains, answers)
    restarts_of_second.order("1", RestartWorkers("second"), DEPLOYMENTS)
    restarts_of_second.look([])
    assert drains.workers == drains.due_to_move(float("inf")) == ("decode-0.m2",)
    assert drains.finished(1e9, {"decode-0.m2": 1}) == ["decode-0.m2"]


def test_what_cannot_be_restarted_is_said() -> None:
    drains, answers = Drains(), list[tuple[str, Answer]]()
    made = restarts(drains, answers)
    made.order("1", RestartWorkers("third"), DEPLOYMENTS)
    made.order("2", RestartWorkers(drains_within_s=-1.0), DEPLOYMENTS)
    assert [isinstance(answer, OrderRefused) for _, answer in answers] == [True, True]
    assert "third" in str(answers[0][1])
    assert not isinstance(answers[0][1], OrderDone)
