"""Links of a process that count. Connections themselves: tests/contract/test_links.py."""

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity, Link, Peer

POOL = Peer(Role.KV_POOL, "pool-0")
MESSAGE = AbortRequest(RequestId("r1"))


class Heard:
    """Notes what the handler is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def on_linked(self, peer: Peer) -> None:
        self.events.append(("linked", peer))

    def on_message(self, peer: Peer, message: Message) -> None:
        self.events.append(("message", message))

    def on_lost(self, peer: Peer) -> None:
        self.events.append(("lost", peer))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def links(heard: Heard) -> LinkManager:
    return LinkManager(Identity(Role.DECODE_WORKER, "decode-0", b"s" * 32), Codec(AbortRequest), heard)


def linked(links: LinkManager, dialled: str | None) -> Link:
    made = links._make_link(dialled)
    made.peer = POOL
    links._linked(dialled, made)
    return made


async def test_nothing_is_heard_of_a_link_after_it_was_replaced(links: LinkManager, heard: Heard) -> None:
    former, latter = linked(links, None), linked(links, None)
    links._received(former, MESSAGE)
    assert heard.events == [("linked", POOL), ("lost", POOL), ("linked", POOL)]
    links._received(latter, MESSAGE)
    assert heard.events[-1] == ("message", MESSAGE)


async def test_a_link_that_comes_while_its_predecessor_is_hung_up_is_not_kept(links: LinkManager, heard: Heard) -> None:
    address = "unix:/nowhere"
    links.dial(address)
    former = linked(links, address)
    links.hang_up(address)
    linked(links, address)  # of an earlier attempt, whose handshake was under way
    links._lost(address, former)
    assert heard.events == [("linked", POOL), ("lost", POOL)]
    assert links.peers() == ()
    await links.close()
