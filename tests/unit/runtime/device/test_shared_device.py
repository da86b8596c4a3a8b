"""Workers of several models on one device: work that nobody waits for gives way, for a bounded time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from alignedserve.runtime.device import shared_device
from alignedserve.runtime.device.cores import num_cores
from alignedserve.runtime.device.shared_device import DeviceBoard, SharedDevice
from tests.support.marks import each

_POSTING = """
import sys, time
from pathlib import Path
from alignedserve.runtime.device.shared_device import DeviceBoard
board = DeviceBoard(Path(sys.argv[1]), "2")
board.post(time.monotonic() + 0.3)
print(board._own, flush=True)
time.sleep(60)
"""


class Clock:
    """A clock that every look moves on by a millisecond, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._alarm: tuple[float, Callable[[], None]] | None = None

    def monotonic(self) -> float:
        self.pass_time(0.001)
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self._alarm is not None and self.now >= self._alarm[0]:
            _, ring = self._alarm
            self._alarm = None
            ring()

    def ring_in(self, seconds: float, ring: Callable[[], None]) -> None:
        self._alarm = (self.now + seconds, ring)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns-cpu"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Workers of this test look at this clock."""
    made = Clock()
    monkeypatch.setattr(shared_device, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


def worker(path: Path, deployment_id: str, share: float = 0.1, *, num_threads: int = 0) -> SharedDevice:
    return SharedDevice(DeviceBoard(path, deployment_id, num_threads), share)


def iterate(clock: Clock, device: SharedDevice, seconds: float, *, is_real_time: bool) -> float:
    """Perform an iteration and return how long it waited."""
    began_s = clock.now
    device.begin(is_real_time=is_real_time)
    waited_s = clock.now - began_s
    clock.pass_time(seconds)
    device.end(is_real_time=is_real_time)
    return waited_s


def test_a_post_is_seen_by_other_models_until_its_time(path: Path) -> None:
    chat, documents = DeviceBoard(path, ""), DeviceBoard(path, "2")
    chat.post(10.0)
    assert documents.is_posted(9.0)
    assert not documents.is_posted(10.0)
    assert not chat.is_posted(9.0)


@each(
    ("num_threads", "is_prompt", "gives_way"),
    [(num_cores(), True, True), (num_cores(), False, False), (num_cores() // 2, True, False), (0, True, False)],
)
def test_workers_of_one_model_give_way_to_each_others_prompts_where_cores_are_too_few(
    path: Path, num_threads: int, is_prompt: bool, gives_way: bool
) -> None:
    first, second = DeviceBoard(path, "", num_threads), DeviceBoard(path, "", num_threads)
    first.post(10.0, is_prompt=is_prompt)
    assert second.is_posted(9.0) is gives_way
    assert not first.is_posted(9.0)
    first.close()
    assert not second.is_posted(9.0)
    second.close()


def test_documents_wait_for_another_models_chats_but_not_for_ever(path: Path, clock: Clock) -> None:
    chat, documents = worker(path, ""), worker(path, "2", share=0.25)
    assert iterate(clock, documents, 0.02, is_real_time=False) < 0.01
    chat.begin(is_real_time=True)
    waited_s = iterate(clock, documents, 0.0, is_real_time=False)
    assert waited_s == pytest.approx(3.0 * 0.02, rel=0.2)  # a quarter is its share


def between_layers(clock: Clock, device: SharedDevice) -> float:
    """Return how long it stands still there."""
    began_s = clock.now
    device.between_layers()
    return clock.now - began_s


def test_documents_stand_still_between_layers_in_proportion_to_what_they_have_computed(
    path: Path, clock: Clock
) -> None:
    chat, documents = worker(path, ""), worker(path, "2", share=0.25)
    documents.begin(is_real_time=False)
    clock.pass_time(0.02)
    assert between_layers(clock, documents) < 0.005
    chat.begin(is_real_time=True)
    stood_s = between_layers(clock, documents)
    assert stood_s == pytest.approx(3.0 * 0.02, abs=0.015)  # a look at the clock takes 1 ms
    assert between_layers(clock, documents) < 0.02
    documents.end(is_real_time=False)
    assert documents.take_stopped_s() == pytest.approx(stood_s, abs=0.02)
    assert documents.take_stopped_s() == 0.0


def test_they_go_on_where_somebody_waits_for_their_own_worker(path: Path, clock: Clock) -> None:
    chat, documents = worker(path, ""), worker(path, "2")
    documents.begin(is_real_time=False)
    clock.pass_time(0.2)
    chat.begin(is_real_time=True)
    clock.ring_in(0.05, documents.on_arrival)
    assert between_layers(clock, documents) == pytest.approx(0.05, abs=0.005)
    assert between_layers(clock, documents) < 0.005


def test_neither_chats_nor_what_is_timed_stands_still_between_layers(path: Path, clock: Clock) -> None:
    chat, other = worker(path, ""), worker(path, "2")
    iterate(clock, other, 0.2, is_real_time=False)
    chat.begin(is_real_time=True)
    other.begin(is_real_time=True)
    assert between_layers(clock, other) < 0.005
    other.end(is_real_time=True)
    iterate(clock, chat, 0.0, is_real_time=True)
    other.begin(is_real_time=False, may_stop=False)
    chat.begin(is_real_time=True)
    assert between_layers(clock, other) < 0.005


def test_a_chat_within_an_iteration_of_documents_makes_others_stand_still(path: Path, clock: Clock) -> None:
    first, second = (worker(path, "", num_threads=num_cores()) for _ in range(2))
    for one in (first, second):
        one.begin(is_real_time=False)
    clock.pass_time(0.02)
    with first.taken_within():
        assert between_layers(clock, second) > 0.1
        assert between_layers(clock, first) < 0.005  # in the layers of the chat
    clock.pass_time(0.05)
    assert between_layers(clock, second) < 0.005


def test_others_stand_still_from_when_a_chat_comes(path: Path, clock: Clock) -> None:
    chat, documents = worker(path, ""), worker(path, "2")
    documents.begin(is_real_time=False)
    clock.pass_time(0.02)
    chat.on_arrival()
    assert between_layers(clock, documents) > 0.1


def test_documents_go_on_as_soon_as_nobody_waits(path: Path, clock: Clock) -> None:
    chat, documents = worker(path, ""), worker(path, "2", share=0.01)
    iterate(clock, documents, 0.02, is_real_time=False)
    iterate(clock, chat, 0.0, is_real_time=True)
    assert iterate(clock, documents, 0.0, is_real_time=False) < 0.2


def test_chats_wait_for_none(path: Path, clock: Clock) -> None:
    chat, other = worker(path, ""), worker(path, "2")
    chat.begin(is_real_time=True)
    assert iterate(clock, other, 0.0, is_real_time=True) < 0.01


def test_an_arrival_ends_the_wait(path: Path, clock: Clock) -> None:
    chat, documents = worker(path, ""), worker(path, "2", share=0.01)
    iterate(clock, documents, 0.02, is_real_time=False)
    chat.begin(is_real_time=True)
    clock.ring_in(0.05, documents.on_arrival)
    assert iterate(clock, documents, 0.0, is_real_time=False) == pytest.approx(0.05, abs=0.005)


def test_what_arrives_before_the_wait_ends_it_too_but_only_one(path: Path, clock: Clock) -> None:
    chat, documents = worker(path, ""), worker(path, "2", share=0.05)
    iterate(clock, documents, 0.02, is_real_time=False)
    chat.begin(is_real_time=True)
    documents.on_arrival()
    assert iterate(clock, documents, 0.02, is_real_time=False) < 0.01
    assert iterate(clock, documents, 0.0, is_real_time=False) > 0.2


def test_a_slot_of_a_process_that_is_killed_is_free_again_and_its_post_expires(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _POSTING, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        taken = int(process.stdout.readline())
        board = DeviceBoard(path, "")
        assert board._own != taken
        os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.3)
    assert not board.is_posted(time.monotonic())
    board.close()
    assert DeviceBoard(path, "3")._own == taken


def test_a_share_of_everything_gives_way_to_none(tmp_path: Path) -> None:
    assert SharedDevice.of(tmp_path, "cuda:0", "", 1.0) is None
    assert SharedDevice.of(tmp_path, "cuda:0", "", 0.5) is not None
    assert (tmp_path / "turns-cuda-0").stat().st_mode & 0o077 == 0
