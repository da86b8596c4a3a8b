"""What a process keeps after its start: garbage collection, free memory, pages of files."""

import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from threading import Event

import numpy as np
import psutil
import pytest

from alignedserve.process.heap import forget_pages_of_files, settle_heap, unwritten_mappings
from alignedserve.process.turn_threads import TurnThreads


@pytest.fixture
def _collector_restored() -> object:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("_collector_restored")
def test_what_exists_is_looked_at_no_more_and_later_cycles_are_still_freed() -> None:
    settle_heap()
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold()[0] > 700
    before = len(gc.get_objects())
    cycle: list[object] = []
    cycle.append(cycle)
    assert len(gc.get_objects()) > before
    del cycle
    assert gc.collect() >= 1


SMAPS = """\
7f00000-7f02000 r--p 00000000 08:01 12 /lib/clean.so
Rss:                   8 kB
Anonymous:             0 kB
Swap:                  0 kB
7f02000-7f03000 r-xp 00002000 08:01 12 /lib/clean.so
Anonymous:             0 kB
Swap:                  0 kB
7f03000-7f04000 r--p 00003000 08:01 12 /lib/relocated.so
Anonymous:             4 kB
Swap:                  0 kB
7f04000-7f05000 r--p 00003000 08:01 12 /lib/swapped out.so
Anonymous:             0 kB
Swap:                  4 kB
7f05000-7f06000 rw-p 00004000 08:01 12 /lib/written.so
Anonymous:             0 kB
7f06000-7f07000 r--s 00000000 00:01 13 /dev/shm/shared
Anonymous:             0 kB
7f07000-7f08000 r--p 00000000 00:00 0
Anonymous:             0 kB
7f08000-7f09000 r-xp 00000000 00:00 0                                    [vdso]
Anonymous:             0 kB
"""


def test_pages_of_files_that_nobody_wrote_are_told_from_all_others() -> None:
    assert unwritten_mappings(SMAPS) == [(0x7F00000, 0x7F02000), (0x7F02000, 0x7F03000)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forgotten")
def test_a_process_goes_on_without_the_pages_of_its_files() -> None:
    before = psutil.Process().memory_full_info()
    forget_pages_of_files()
    after = psutil.Process().memory_full_info()
    assert before.shared - after.shared > 4 << 20
    assert np.linalg.norm(np.eye(3)) == pytest.approx(3**0.5)


FAULTS_OF_PASSES = """
import ctypes, resource
from alignedserve.process.heap import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
keep_freed_memory()
for turn in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    places = [ctypes.c_void_p(libc.malloc(8 << 20)) for _ in range(8)]
    for place in places:
        ctypes.memset(place, 1, 8 << 20)
    for place in places:
        libc.free(place)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no such option")
def test_what_a_pass_takes_and_frees_is_not_given_anew_to_the_next() -> None:
    told = subprocess.run([sys.executable, "-c", FAULTS_OF_PASSES], capture_output=True, text=True, check=True)
    assert int(told.stdout) < 100, "of 16 384 pages"


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
