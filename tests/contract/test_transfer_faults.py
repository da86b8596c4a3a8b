"""Block transfers between processes of which one is killed, stopped or cut off in the middle of a transfer.

The other one must notice within the configured time, live on, and be able to go on with a new pair.
"""

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from alignedserve.core.errors import PeerLost
from alignedserve.runtime.kv.transfers.block_server import _MAX_STRANGERS
from tests.harnesses.block_peer import BlockClient, Owner, PeerProcess

pytestmark = pytest.mark.slow

CHANNELS = ("gloo", "tcp")
TIMEOUT_S = 1.5
# Above the configured time: a loaded machine, and the rest of a piece.
PLUS_S = 1.5


class Processes:
    """Whatever a test starts, ended with it."""

    def __init__(self) -> None:
        self._started: list[PeerProcess] = []

    def start(self, role: str, address: str, *arguments: str, prefix: Sequence[str] = ()) -> PeerProcess:
        process = PeerProcess(role, address, str(TIMEOUT_S), *arguments, prefix=prefix)
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.close()


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    made = Owner(tmp_path, f"unix:{tmp_path}/b.sock", TIMEOUT_S)
    yield made
    made.close()


class Busy:
    """Rounds of transfers in a thread of their own, until the other end is lost."""

    def __init__(self, client: BlockClient) -> None:
        self._asking = client
        self.lost_at_s: float | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert client.num_rounds.acquire(timeout=30.0)
        assert client.num_rounds.acquire(timeout=30.0)  # it is in the third one, or behind it

    def _run(self) -> None:
        self.lost_at_s = self._asking.round_until_lost()

    def noticed_after_s(self, since_s: float) -> float:
        self._thread.join(30)
        assert self.lost_at_s is not None, "never noticed"
        return self.lost_at_s - since_s


def until(condition: Callable[[], bool], within_s: float, *, or_never: bool = False) -> bool:
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > within_s:
            assert or_never, "not in time"
            return False
        time.sleep(0.01)
    return True


# --- the owner is lost


@pytest.mark.parametrize(
    ("how", "transport"),
    [pytest.param(signal.SIGKILL, "tcp", id="killed"), pytest.param(signal.SIGSTOP, "gloo", id="stopped")],
)
def test_a_lost_owner_is_noticed_and_a_new_one_works(
    processes: Processes, owner: Owner, tmp_path: Path, how: signal.Signals, transport: str
) -> None:
    owner_process = processes.start("owner", "tcp:127.0.0.1:0", str(tmp_path))
    client = BlockClient(owner_process.said, TIMEOUT_S, transport=transport)
    busy = Busy(client)
    assert busy.noticed_after_s(owner_process.signal(how)) < TIMEOUT_S + PLUS_S
    with pytest.raises(PeerLost):
        client.round(99, 2)
    client.transfer.close()
    again = BlockClient(owner.server.address, TIMEOUT_S)
    again.round(1, 8)
    again.transfer.close()


def test_an_owner_that_closes_is_lost(owner: Owner) -> None:
    client = BlockClient(owner.server.address, TIMEOUT_S)
    client.round(1, 4)
    owner.server.close()
    owner.server.close()  # may be repeated
    with pytest.raises(PeerLost):
        client.round(2, 4)
    with pytest.raises(PeerLost):
        BlockClient(owner.server.address, TIMEOUT_S)
    client.transfer.close()


def test_connections_without_a_word_keep_out_only_their_own_host(owner: Owner, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    beyond = Owner(other, "tcp:127.0.0.1:0", 60.0)
    port = int(beyond.server.address.rpartition(":")[2])
    silent = [
        socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
        for _ in range(_MAX_STRANGERS + 30)
    ]
    began_s = time.monotonic()
    client = BlockClient(beyond.server.address, 60.0)
    client.round(1, 4)
    assert time.monotonic() - began_s < 40.0  # the silent ones are dropped after sixty
    assert beyond.server.num_peers <= _MAX_STRANGERS + 1
    client.transfer.close()
    for one in silent:
        one.close()
    beyond.close()


# --- the client end is lost


@pytest.mark.parametrize("transport", CHANNELS)
def test_an_asking_end_that_is_killed_or_stopped_is_dropped_and_others_are_served(
    processes: Processes, owner: Owner, transport: str
) -> None:
    other = BlockClient(owner.server.address, 5.0, name="decode-1", transport=transport)
    process = processes.start("client", owner.server.address, "decode-0", transport)
    for _ in range(8):
        process.signal(signal.SIGSTOP)
        other.round(5000, 4)
        if until(lambda: owner.server.num_peers == 1, TIMEOUT_S + PLUS_S, or_never=True):
            break
        process.signal(signal.SIGCONT)  # it was between two transfers, where it may take its time
        time.sleep(0.31)
    assert owner.server.num_peers == 1
    process.signal(signal.SIGCONT)
    while (said := process.line()) == "round":
        pass
    assert said.startswith("lost")
    again = processes.start("client", owner.server.address, "decode-0", transport)
    assert owner.server.num_peers == 2
    again.signal(signal.SIGKILL)
    other.round(5001, 4)
    until(lambda: owner.server.num_peers == 1, TIMEOUT_S + PLUS_S)
    other.transfer.close()


def test_a_socket_that_a_killed_owner_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    owner = Owner(tmp_path, f"unix:{path}", TIMEOUT_S)
    client = BlockClient(owner.server.address, TIMEOUT_S)
    client.round(1, 2)
    client.transfer.close()
    owner.close()
    assert not path.exists()


def test_a_peer_that_comes_again_replaces_its_former_connection(owner: Owner) -> None:
    first = BlockClient(owner.server.address, TIMEOUT_S)
    first.round(1, 4)
    second = BlockClient(owner.server.address, TIMEOUT_S)
    second.round(2, 4)
    until(lambda: owner.server.num_peers == 1, 20.0)
    with pytest.raises(PeerLost):
        first.round(3, 4)
    second.round(4, 4)
    second.transfer.close()
