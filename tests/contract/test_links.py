"""Links between processes: proof of the secret, order, loss, silence, malformed input."""

import asyncio
import contextlib
import math
import ssl
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
from typing_extensions import override

from alignedserve.core.ids import LeaseId, RequestId
from alignedserve.messages.caches import LeasesReleased
from alignedserve.messages.gateways import AbortRequest, SubmitRequest
from alignedserve.messages.handshake import Ping, Role
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.link_manager import _MAX_PENDING_MESSAGES, LinkManager
from alignedserve.process.links import Identity, Peer
from alignedserve.process.tls import CertificateAuthority, Credentials
from tests.harnesses import clock_peer
from tests.support.waiting import holds

pytestmark = pytest.mark.slow

AUTHORITY = CertificateAuthority.new("this cluster")
CODEC = Codec(AbortRequest | Ping)


@dataclass
class Recorder:
    events: list[tuple[str, str]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_linked(self, peer: Peer) -> None:
        self._note("linked", peer.name)

    def on_message(self, peer: Peer, message: Message) -> None:
        assert isinstance(message, AbortRequest)
        self._note("message", message.request_id)

    def on_lost(self, peer: Peer) -> None:
        self._note("lost", peer.name)

    def _note(self, kind: str, what: str) -> None:
        self.events.append((kind, what))
        self.changed.set()

    async def wait_for(self, event: tuple[str, str], timeout_s: float = 20.0) -> None:
        async with asyncio.timeout(timeout_s):
            while event not in self.events:
                self.changed.clear()
                await self.changed.wait()


def board(
    name: str,
    recorder: Recorder,
    secret: bytes = b"s" * 32,
    peer_timeout_s: float = 5.0,
    credentials: Credentials | None = None,
) -> LinkManager:
    identity = Identity(Role.ROUTER, name, secret, peer_timeout_s, credentials or AUTHORITY.issue(name))
    return LinkManager(identity, CODEC, recorder)


@pytest.fixture(params=["unix", "tls"])
def address(request: pytest.FixtureRequest, tmp_path: Path, unused_tcp_port: int) -> str:
    return f"unix:{tmp_path}/a.sock" if request.param == "unix" else f"{request.param}:127.0.0.1:{unused_tcp_port}"


@pytest.mark.parametrize("address", ["unix", "tcp", "tls"], indirect=True)
async def test_messages_arrive_in_order_both_ways(address: str) -> None:
    here, there = Recorder(), Recorder()
    listener, dialler = board("listener", here), board("dialler", there)
    await listener.listen(address)
    dialler.dial(address)
    await here.wait_for(("linked", "dialler"))
    await there.wait_for(("linked", "listener"))
    for number in range(50):
        assert dialler.send("listener", AbortRequest(RequestId(f"r{number}")))
    assert listener.send("dialler", AbortRequest(RequestId("back")))
    await here.wait_for(("message", "r49"))
    await there.wait_for(("message", "back"))
    assert [what for kind, what in here.events if kind == "message"] == [f"r{number}" for number in range(50)]
    await dialler.close()
    await listener.close()


async def test_sending_to_an_address_before_its_listener(address: str) -> None:
    here, there = Recorder(), Recorder()
    listener, dialler = board("listener", here), board("dialler", there)
    dialler.send_to(address, AbortRequest(RequestId("early")))
    await asyncio.sleep(0.05)
    await listener.listen(address)
    await here.wait_for(("message", "early"))
    await dialler.close()
    await listener.close()


async def test_no_more_messages_are_kept_than_the_bound_for_an_address_where_nothing_listens(address: str) -> None:
    here, there = Recorder(), Recorder()
    listener, dialler = board("listener", here), board("dialler", there)
    for number in range(_MAX_PENDING_MESSAGES + 20):
        dialler.send_to(address, AbortRequest(RequestId(f"r{number}")))
    await listener.listen(address)
    await there.wait_for(("linked", "listener"))
    assert dialler.send("listener", AbortRequest(RequestId("last")))
    await here.wait_for(("message", "last"))
    arrived = [what for kind, what in here.events if kind == "message"]
    assert arrived == [*(f"r{number}" for number in range(_MAX_PENDING_MESSAGES)), "last"]
    await dialler.close()
    await listener.close()


async def test_a_peer_without_the_secret_is_refused(address: str, caplog: pytest.LogCaptureFixture) -> None:
    here, there = Recorder(), Recorder()
    listener, dialler = board("listener", here), board("dialler", there, secret=b"x" * 32)
    await listener.listen(address)
    dialler.dial(address)
    await holds(lambda: "does not know this cluster's secret" in caplog.text)
    await asyncio.sleep(0.3)  # it has dialled again since
    assert here.events == []
    assert there.events == []
    assert caplog.text.count("does not know this cluster's secret") == 1
    await dialler.close()
    await listener.close()


@pytest.mark.parametrize(
    ("credentials", "said"),
    [
        pytest.param(CertificateAuthority.new("another").issue("dialler"), "", id="another cluster's certificate"),
        pytest.param(AUTHORITY.issue("prefill-3"), "of another process", id="another process's certificate"),
    ],
)
async def test_a_peer_with_another_certificate_is_refused(
    credentials: Credentials, said: str, unused_tcp_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"tls:127.0.0.1:{unused_tcp_port}"
    here, there = Recorder(), Recorder()
    listener, dialler = board("listener", here), board("dialler", there, credentials=credentials)
    await listener.listen(address)
    dialler.dial(address)
    await holds(lambda: said in caplog.text)
    await asyncio.sleep(0.3)
    assert here.events == []
    await dialler.close()
    await listener.close()


@pytest.mark.parametrize("has_tls", [False, True])
async def test_without_a_certificate_nothing_is_answered(has_tls: bool, unused_tcp_port: int) -> None:
    here = Recorder()
    listener = board("listener", here, peer_timeout_s=60.0)
    await listener.listen(f"tls:127.0.0.1:{unused_tcp_port}")
    context = None
    if has_tls:
        context = ssl.create_default_context(cadata=AUTHORITY.issue("nobody").authority.decode())
        context.check_hostname = False
    reader, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port, ssl=context)
    writer.write(b"hello, hello, hello")
    async with asyncio.timeout(30):
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError, ssl.SSLError)):
            await reader.readexactly(64)
    writer.close()
    assert here.events == []
    await listener.close()


async def test_a_lost_peer_is_redialled(address: str) -> None:
    here, there = Recorder(), Recorder()
    listener, dialler = board("listener", here), board("dialler", there)
    await listener.listen(address)
    dialler.dial(address)
    await here.wait_for(("linked", "dialler"))
    listener.disconnect("dialler")
    await here.wait_for(("lost", "dialler"))
    here.events.clear()
    await here.wait_for(("linked", "dialler"))
    await dialler.close()
    await listener.close()


@pytest.mark.parametrize(
    "payload",
    [
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 5) + b"hello",
        struct.pack("<I", 3) + b"\x91\xa3X",
    ],
)
async def test_garbage_before_the_handshake_ends_the_connection(tmp_path: Path, payload: bytes) -> None:
    here = Recorder()
    listener = board("listener", here, peer_timeout_s=60.0)
    await listener.listen(f"unix:{tmp_path}/a.sock")
    reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/a.sock")
    writer.write(payload)
    async with asyncio.timeout(30):
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(1 << 20)
    writer.close()
    assert here.events == []
    await listener.close()


async def test_a_message_outside_the_union_closes_the_link(address: str) -> None:
    here, there = Recorder(), Recorder()
    listener, dialler = board("listener", here), board("dialler", there)
    await listener.listen(address)
    dialler.dial(address)
    await there.wait_for(("linked", "listener"))
    dialler.send("listener", LeasesReleased((LeaseId(1),)))
    await here.wait_for(("lost", "dialler"))
    await dialler.close()
    await listener.close()


async def test_a_linked_peer_that_falls_silent_is_lost(address: str) -> None:
    here = Recorder()
    listener = board("listener", here, peer_timeout_s=0.5)
    dialler = board("dialler", Recorder(), peer_timeout_s=600.0)  # its first ping comes after two minutes
    await listener.listen(address)
    dialler.dial(address)
    await here.wait_for(("lost", "dialler"))
    await dialler.close()
    await listener.close()


async def test_a_handshake_that_is_not_completed_is_ended_however_much_is_said(tmp_path: Path) -> None:
    here = Recorder()
    listener = board("listener", here, peer_timeout_s=0.5)
    await listener.listen(f"unix:{tmp_path}/a.sock")
    reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/a.sock")
    writer.write(struct.pack("<I", 4000))
    while not reader.at_eof():  # one byte at a time, never silent
        writer.write(b"x")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1024), 0.05)
    writer.close()
    assert here.events == []
    await listener.close()


async def test_a_clock_that_shows_no_time_ends_the_link(unused_tcp_port: int, caplog: pytest.LogCaptureFixture) -> None:
    address = f"tcp:127.0.0.1:{unused_tcp_port}"
    here, there = Recorder(), Recorder()
    listener, dialler = board("listener", here), board("dialler", there)
    await listener.listen(address)
    dialler.dial(address)
    await there.wait_for(("linked", "listener"))
    dialler.send("listener", Ping(math.nan))
    await here.wait_for(("lost", "dialler"))
    here.events.clear()
    await here.wait_for(("linked", "dialler"))  # it comes back, as after any loss
    assert "message refused" in caplog.text
    await dialler.close()
    await listener.close()


@pytest.mark.parametrize("address", ["tls", "unix"], indirect=True)
def test_a_stalled_process_does_not_take_its_peers_for_silent(address: str) -> None:
    """On uvloop, as in production: what has arrived must be read before timers run."""
    elsewhere = asyncio.new_event_loop()
    thread = threading.Thread(target=elsewhere.run_forever)
    thread.start()

    async def listen() -> LinkManager:
        listener = board("patient", Recorder(), peer_timeout_s=4.0)  # pings every 0.8 s
        await listener.listen(address)
        return listener

    async def stall() -> list[tuple[str, str]]:
        here = Recorder()
        stalled = board("stalled", here, peer_timeout_s=1.5)
        stalled.dial(address)
        await here.wait_for(("linked", "patient"))
        time.sleep(1.8)  # noqa: ASYNC251  (stopped, or starved of CPU, while pings pile up in the socket)
        await asyncio.sleep(0.5)
        await stalled.close()
        return here.events

    patient = asyncio.run_coroutine_threadsafe(listen(), elsewhere).result()
    events = uvloop.run(stall())
    asyncio.run_coroutine_threadsafe(patient.close(), elsewhere).result()
    elsewhere.call_soon_threadsafe(elsewhere.stop)
    thread.join()
    elsewhere.close()
    assert events == [("linked", "patient")]


@pytest.mark.slow
async def test_a_request_from_a_host_with_another_clock_arrives_now(unused_tcp_port: int) -> None:
    address = f"tcp:127.0.0.1:{unused_tcp_port}"
    arrived: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    class Handler(Recorder):
        @override
        def on_message(self, peer: Peer, message: Message) -> None:
            assert isinstance(message, SubmitRequest)
            arrived.set_result(message.request.arrival_s)

    listener = LinkManager(Identity(Role.ROUTER, "router", clock_peer.SECRET), Codec(SubmitRequest | Ping), Handler())
    await listener.listen(address)
    ahead_s = 5000
    peer = await asyncio.create_subprocess_exec(
        *("unshare", "--time", "--monotonic", str(ahead_s), "--fork", "--kill-child", sys.executable),
        *("-m", "tests.harnesses.clock_peer", address),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        done, _ = await asyncio.wait(
            (arrived, asyncio.ensure_future(peer.wait())), timeout=20, return_when=asyncio.FIRST_COMPLETED
        )
        if arrived not in done:
            pytest.skip("needs the right to make a time namespace")
        assert abs(arrived.result() - time.monotonic()) < 20.0
    finally:
        if peer.returncode is None:
            peer.kill()
        await peer.wait()
        await listener.close()


def test_secrets_are_in_no_text_of_an_identity() -> None:
    credentials = AUTHORITY.issue("decode-0")
    text = repr(Identity(Role.DECODE_WORKER, "decode-0", b"the secret", credentials=credentials))
    assert "the secret" not in text
    assert "PRIVATE KEY" not in text
