"""Work of real-time requests goes first, and best effort has its share of the turns."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Event

import pytest

from alignedserve.process.turn_threads import TurnThreads


class Thread:
    """One thread, which is kept busy while work comes."""

    def __init__(self) -> None:
        self.threads = TurnThreads(1, "turns")
        self.done: list[str] = []
        self._may_go_on = Event()
        has_begun = Event()

        def hold() -> None:
            has_begun.set()
            self._may_go_on.wait(20)

        self.threads.submit(hold)
        has_begun.wait(20)

    def work(self, name: str, *, is_real_time: bool, client: str = "") -> "Future[None]":
        note: Callable[[], None] = lambda: self.done.append(name)  # noqa: E731
        return self.threads.submit(note, is_real_time=is_real_time, client=client)

    def go_on(self) -> list[str]:
        self._may_go_on.set()
        self.threads.submit(lambda: None).result(20)
        self.threads.submit(lambda: None, is_real_time=False).result(20)
        self.threads.close()
        return self.done


def test_real_time_work_goes_first_and_what_both_need_goes_with_it() -> None:
    thread = Thread()
    thread.work("a", is_real_time=False)
    shared = thread.work("b", is_real_time=False)
    thread.work("chat", is_real_time=True)
    thread.threads.hasten(shared)
    assert thread.go_on() == ["chat", "b", "a"]


def test_best_effort_has_a_twentieth_of_the_turns() -> None:
    thread = Thread()
    for number in range(50):
        thread.work(f"chat {number}", is_real_time=True)
    thread.work("document", is_real_time=False)
    assert thread.go_on().index("document") == 19


def test_clients_of_a_class_have_turns_one_after_the_other() -> None:
    thread = Thread()
    for is_real_time in (False, True):
        for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
            thread.work(name, is_real_time=is_real_time, client=name[0])
    assert thread.go_on() == ["a1", "b1", "c1", "a2", "b2", "a3"] * 2


def test_an_error_is_for_who_waits_and_work_that_waits_is_cancelled_at_the_end() -> None:
    def fail() -> None:
        raise ValueError("no")

    thread = Thread()
    failing = thread.threads.submit(fail)
    thread.go_on()
    with pytest.raises(ValueError, match="no"):
        failing.result(0)
    busy = Thread()
    waiting = busy.work("late", is_real_time=False)
    busy.threads.close(waits=False)
    assert waiting.cancelled()
    busy._may_go_on.set()
    with pytest.raises(RuntimeError):
        busy.work("later", is_real_time=True)
