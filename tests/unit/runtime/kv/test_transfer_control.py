"""A connection that another thread drops is never waited for under a number that a newer connection has by then."""

import select
import socket
import threading

import pytest

from alignedserve.core.errors import PeerLost
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket


class LatePoll:
    """A thread that begins to wait has let others run before the kernel knows: here they drop its connection first."""

    def __init__(self) -> None:
        self.is_waiting = threading.Event()
        self.is_dropped = threading.Event()
        self.others: list[socket.socket] = []
        self._poll = select.poll

    def __call__(self) -> "LatePoll":
        self._waiting = self._poll()
        return self

    def register(self, connection: socket.socket, events: int) -> None:
        self._waiting.register(connection, events)

    def poll(self) -> list[tuple[int, int]]:
        self.is_waiting.set()
        assert self.is_dropped.wait(30)
        self.others = [one for _ in range(4) for one in socket.socketpair()]  # they take the numbers that are free
        return self._waiting.poll(5000)


@pytest.fixture
def late_poll(monkeypatch: pytest.MonkeyPatch) -> LatePoll:
    late = LatePoll()
    monkeypatch.setattr("alignedserve.runtime.kv.transfers.control_socket.select.poll", late)
    return late


def test_a_connection_that_is_dropped_as_its_thread_begins_to_wait(late_poll: LatePoll) -> None:
    here, there = socket.socketpair()
    control, ended = ControlSocket(here, 5.0), []

    def serve() -> None:
        try:
            control.wait_readable()
            control.receive()
        except PeerLost as error:
            ended.append(str(error))
        finally:
            control.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert late_poll.is_waiting.wait(30)
    control.disconnect()
    control.disconnect()  # may be repeated
    late_poll.is_dropped.set()
    thread.join(30)
    assert ended == ["the other end of a block transfer closed the connection"]
    control.disconnect()
    for one in (there, *late_poll.others):
        one.close()
