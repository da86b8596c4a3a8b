"""Work at low priority: on its own thread, whose threads are quiet too, and nothing else's priority changes."""

import os
import threading

import pytest

from alignedserve.process.worker_threads import run_quietly


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_it_and_what_it_starts_are_of_low_priority_and_nothing_else_is() -> None:
    before = niceness()

    def work() -> tuple[int, int]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(niceness()))
        thread.start()
        thread.join()
        return niceness(), found[0]

    assert run_quietly(work) == (10, 10)
    assert niceness() == before


def test_its_errors_are_raised() -> None:
    def fail() -> None:
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        run_quietly(fail)
