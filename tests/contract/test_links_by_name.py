"""Links by name: sockets on one node, published ports between nodes, and a directory that is away or out of date."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from alignedserve.core.errors import PeerLost, ProtocolError
from alignedserve.core.ids import RequestId
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.process import addresses, link_manager
from alignedserve.process.addresses import AddressBook, AddressResolver, Publication
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity
from alignedserve.process.tls import CertificateAuthority
from tests.contract.test_links import CODEC, Recorder
from tests.support.waiting import holds

pytestmark = pytest.mark.slow


@dataclass
class SharedDirectory:
    """A directory of the processes of this test; it can be away, or hang."""

    entries: dict[str, str] = field(default_factory=dict)
    is_away: bool = False
    may_answer: threading.Event = field(default_factory=threading.Event)
    num_asked: int = 0

    def __post_init__(self) -> None:
        self.may_answer.set()

    def publish(self, name: str, entry: str) -> None:
        self._check()
        self.entries[name] = entry

    def look_up(self, name: str) -> str | None:
        self.num_asked += 1
        self._check()
        return self.entries.get(name)

    def _check(self) -> None:
        self.may_answer.wait()
        if self.is_away:
            raise PeerLost("the directory is away")


AUTHORITY = CertificateAuthority.new("test")


def manager(name: str, book: AddressBook | None) -> tuple[LinkManager, Recorder]:
    recorder = Recorder()
    identity = Identity(Role.ROUTER, name, b"s" * 32, credentials=AUTHORITY.issue(name))
    return LinkManager(identity, CODEC, recorder, book), recorder


class Pair(NamedTuple):
    """A process that listens, a decode worker, and what each of them has seen."""

    listener: LinkManager
    heard: Recorder
    dialler: LinkManager
    linked: Recorder


@asynccontextmanager
async def pair(name: str, at: AddressBook, dialler_at: AddressBook) -> AsyncIterator[Pair]:
    """Listen under this name, with a decode worker that may dial it; both are closed in the end."""
    made = Pair(*manager(name, at), *manager("decode-0", dialler_at))
    await made.listener.listen(name)
    try:
        yield made
    finally:
        await made.dialler.close()
        await made.listener.close()


@pytest.fixture
def directory() -> SharedDirectory:
    return SharedDirectory()


@pytest.fixture(params=["tls"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def here(tmp_path: Path, directory: SharedDirectory, kind: str) -> AddressBook:
    (tmp_path / "here").mkdir()
    return AddressBook(tmp_path / "here", "node-0", "127.0.0.1", directory, has_tls=kind == "tls")


@pytest.fixture
def there(tmp_path: Path, directory: SharedDirectory, kind: str) -> AddressBook:
    (tmp_path / "there").mkdir()
    return AddressBook(tmp_path / "there", "node-1", "127.0.0.1", directory, has_tls=kind == "tls")


@pytest.mark.parametrize("kind", ["tls", "tcp"], indirect=True)
async def test_a_process_of_another_node_is_reached_at_its_published_port(
    here: AddressBook, there: AddressBook, directory: SharedDirectory, kind: str
) -> None:
    async with pair("router", here, there) as (_, heard, dialler, _):
        dialler.send_to("router", AbortRequest(RequestId("r1")))
        await heard.wait_for(("message", "r1"))
        place = Publication.decode(directory.entries["router"])
        assert place.node == "node-0"
        assert place.address.startswith(f"{kind}:127.0.0.1:")


async def test_a_single_host_has_no_port(tmp_path: Path) -> None:
    book = AddressBook(tmp_path)
    assert book.listening("router") == (f"unix:{tmp_path}/router.sock",)
    listener, heard = manager("router", book)
    dialler, _ = manager("decode-0", book)
    dialler.dial("router")
    await listener.listen("router")
    await heard.wait_for(("linked", "decode-0"))
    await dialler.close()
    await listener.close()


async def test_a_process_that_moves_to_another_port_is_found_there(here: AddressBook, there: AddressBook) -> None:
    former, heard = manager("router", here)
    dialler, _ = manager("decode-0", there)
    await former.listen("router")
    dialler.dial("router")
    await heard.wait_for(("linked", "decode-0"))
    await former.close()
    successor, heard = manager("router", here)
    await successor.listen("router")
    await heard.wait_for(("linked", "decode-0"))
    await dialler.close()
    await successor.close()


async def test_the_last_known_place_is_dialled_while_the_directory_is_away(
    here: AddressBook, there: AddressBook, directory: SharedDirectory
) -> None:
    async with pair("router", here, there) as (listener, heard, dialler, _):
        dialler.dial("router")
        await heard.wait_for(("linked", "decode-0"))
        directory.is_away = True
        listener.disconnect("decode-0")
        await heard.wait_for(("lost", "decode-0"))
        heard.events.clear()
        await heard.wait_for(("linked", "decode-0"))


async def test_a_directory_that_hangs_is_asked_once(
    there: AddressBook, directory: SharedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_LOOK_UP_S", 0.01)
    directory.may_answer.clear()
    resolver = AddressResolver(there)
    for _ in range(3):
        with pytest.raises(PeerLost, match="router has not published an address"):
            await resolver.resolve("router")
    await holds(lambda: directory.num_asked > 0)  # its thread may have to wait for a core
    assert directory.num_asked == 1
    directory.entries["router"] = Publication("node-0", "tcp:127.0.0.1:7").encode()
    directory.may_answer.set()
    async with asyncio.timeout(5):
        while True:
            try:
                assert await resolver.resolve("router") == "tcp:127.0.0.1:7"
                break
            except PeerLost:
                await asyncio.sleep(0.01)


async def test_names_need_a_book_and_addresses_stand_for_themselves(here: AddressBook) -> None:
    with pytest.raises(PeerLost):
        await AddressResolver(None).resolve("router")
    assert await AddressResolver(here).resolve("tcp:[::1]:80") == "tcp:[::1]:80"
    assert AddressResolver(replace(here, directory=None)).listening("unix:/x") == ("unix:/x",)


@pytest.mark.parametrize("entry", ["", "node-0", "node-0 unix:/x", " tcp:127.0.0.1:1"])
def test_an_entry_that_cannot_be_read_is_refused(entry: str) -> None:
    with pytest.raises(ProtocolError):
        Publication.decode(entry)


async def test_a_port_that_cannot_be_reached_is_named(
    there: AddressBook, directory: SharedDirectory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_manager, "_SAY_AFTER_S", 0.0)
    directory.entries["router"] = Publication("node-0", "tls:127.0.0.1:1").encode()
    dialler, _ = manager("decode-0", there)
    dialler.dial("router")
    await holds(lambda: "decode-0: no link to router" in caplog.text)
    assert "no connection to tls:127.0.0.1:1" in caplog.text
    await dialler.close()


async def test_a_listener_that_closes_every_connection_is_dialled_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_manager, "_LAST_RETRY_S", 60.0)
    num_accepted = 0

    def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_accepted
        num_accepted += 1
        writer.close()

    server = await asyncio.start_unix_server(refuse, tmp_path / "router.sock")
    dialler, linked = manager("decode-0", AddressBook(tmp_path))
    dialler.dial("router")
    await holds(lambda: num_accepted > 0)
    await asyncio.sleep(0.4)
    assert num_accepted < 10  # after 20, 40, 80 ms and so on, as many in 10 s; after 20 ms each time, twice as many
    assert linked.events == []
    await dialler.close()
    server.close()


async def test_a_peer_that_is_not_wanted_any_more_keeps_its_link_and_is_not_dialled_again(
    here: AddressBook, there: AddressBook, directory: SharedDirectory
) -> None:
    async with pair("prefill-0", here, there) as (listener, heard, dialler, linked):
        dialler.dial("prefill-0")
        await heard.wait_for(("linked", "decode-0"))
        await linked.wait_for(("linked", "prefill-0"))
        dialler.stop_dialling("prefill-0")
        assert dialler.send("prefill-0", AbortRequest(RequestId("r1")))
        await heard.wait_for(("message", "r1"))
        listener.disconnect("decode-0")
        await linked.wait_for(("lost", "prefill-0"))
        num_asked = directory.num_asked
        await asyncio.sleep(0.1)
        assert directory.num_asked == num_asked
        linked.events.clear()
        dialler.dial("prefill-0")
        await linked.wait_for(("linked", "prefill-0"))


async def test_a_link_that_is_hung_up_is_closed_at_both_ends_and_made_anew_when_it_is_dialled(
    here: AddressBook, there: AddressBook, directory: SharedDirectory
) -> None:
    async with pair("pool-0", here, there) as (listener, heard, dialler, linked):
        dialler.dial("pool-0")
        await heard.wait_for(("linked", "decode-0"))
        await linked.wait_for(("linked", "pool-0"))
        dialler.hang_up("pool-0")
        await linked.wait_for(("lost", "pool-0"))
        await heard.wait_for(("lost", "decode-0"))
        num_asked = directory.num_asked
        await asyncio.sleep(0.1)
        assert (dialler.peers(), listener.peers(), directory.num_asked) == ((), (), num_asked)
        linked.events.clear()
        dialler.dial("pool-0")
        await linked.wait_for(("linked", "pool-0"))


def num_links(seen: Recorder) -> int:
    """Count the links that were made and not lost."""
    kinds = [kind for kind, _ in seen.events]
    return kinds.count("linked") - kinds.count("lost")


async def test_a_peer_that_is_hung_up_on_before_it_has_answered_gets_no_link(
    here: AddressBook, there: AddressBook
) -> None:
    async with pair("pool-0", here, there) as (listener, heard, dialler, linked):
        for pause_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008):  # in any part of the handshake
            dialler.dial("pool-0")
            await asyncio.sleep(pause_s)
            dialler.hang_up("pool-0")
        await asyncio.sleep(0.05)  # for a link that should not come
        # One that the other end has made before it sees the end of the connection is lost a moment later.
        await holds(lambda: all(num_links(one) == 0 for one in (linked, heard)))
        assert (dialler.peers(), listener.peers()) == ((), ())


async def test_a_gateway_that_does_not_answer_is_given_up_until_there_is_something_to_send_again(
    here: AddressBook, there: AddressBook, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_manager, "_GIVE_UP_S", 0.05)
    dialler, _ = manager("decode-0", there)
    dialler.send_to("gateway-0", AbortRequest(RequestId("lost")))
    await holds(lambda: "decode-0: gateway-0 is given up" in caplog.text)
    monkeypatch.undo()  # a link takes its time
    gateway, heard = manager("gateway-0", here)
    await gateway.listen("gateway-0")
    dialler.send_to("gateway-0", AbortRequest(RequestId("r1")))
    await heard.wait_for(("message", "r1"))
    assert ("message", "lost") not in heard.events
    await dialler.close()
    await gateway.close()


async def test_a_mistaken_dial_leaves_the_true_link_alone(
    here: AddressBook,
    there: AddressBook,
    directory: SharedDirectory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_manager, "_SAY_REFUSED_S", 0.0)
    async with pair("pool-0", here, there) as (_, heard, dialler, linked):
        dialler.dial("pool-0")
        await linked.wait_for(("linked", "pool-0"))
        directory.entries["router"] = directory.entries["pool-0"]  # the router's former port
        dialler.dial("router")
        await holds(lambda: caplog.text.count("router was dialled and pool-0 answered") > 1)
        assert linked.events == [("linked", "pool-0")]
        assert heard.events == [("linked", "decode-0")]
