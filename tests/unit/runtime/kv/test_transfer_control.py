"""A connection that another thread drops: its user waits for no newer one, and sends nothing in clear."""

import select
import socket
import threading
from functools import partial

import pytest

from alignedserve.core.errors import PeerLost
from alignedserve.process.tls import CertificateAuthority
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


def test_a_connection_that_is_dropped_stays_encrypted_for_the_thread_that_uses_it() -> None:
    authority = CertificateAuthority.new("test")
    ends = [ControlSocket(one, 5.0) for one in socket.socketpair()]
    here, there = ends
    context = authority.issue("there").dialler_context()
    dialling = threading.Thread(target=partial(there.encrypt, context, is_listener=False))
    dialling.start()
    here.encrypt(authority.issue("here").listener_context(), is_listener=True)
    dialling.join()
    there.send_bytes(bytes(range(64)))
    here.wait_readable()
    here.disconnect()
    received = bytearray(32)
    here.receive_bytes(memoryview(received))  # not the encrypted bytes that have come
    assert received == bytes(range(32))
    with pytest.raises(PeerLost):
        here.send_bytes(b"in clear")
    for end in ends:
        end.close()


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "meanwhile"])
def test_a_connection_that_is_dropped_in_the_handshake_is_lost_at_once(is_early: bool) -> None:
    here, there = socket.socketpair()
    control = ControlSocket(here, 60.0)
    ended = threading.Event()

    def serve() -> None:
        with pytest.raises(PeerLost):
            control.encrypt(CertificateAuthority.new("test").issue("here").listener_context(), is_listener=True)
        control.close()
        ended.set()

    if is_early:
        control.disconnect()
    thread = threading.Thread(target=serve)
    thread.start()
    while not is_early and not ended.wait(0.01):  # again, as the thread may not have begun
        control.disconnect()
    assert ended.wait(30)
    thread.join()
    there.close()
