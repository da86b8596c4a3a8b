"""Links of a process that count. Connections themselves: tests/contract/test_links.py."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from alignedserve.core.ids import BatchId, LeaseId, RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.caches import BatchGranted, BlockCopy, BlocksWritten, CancelReservation
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.wire import Codec, Message
from alignedserve.messages.workers import PrefillRequest
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity, Link, Peer
from alignedserve.process.logic_driver import HeldMessages
from tests.support.samples import handoff, request

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


def arriving(name: str) -> PrefillRequest:
    return PrefillRequest(Request(RequestId(name), (1, 2), SamplingParams(), "gateway", 0.0), 1)


class Harness:
    def __init__(self) -> None:
        self.prepared: dict[str, Future[Any]] = {}
        self.delivered: list[tuple[str, Message]] = []
        self.held = HeldMessages(self._prepare, lambda peer, message: self.delivered.append((peer, message)))

    def _prepare(self, message: Message) -> "Sequence[Future[Any]]":
        names: Sequence[str] = ()
        if isinstance(message, PrefillRequest | BlocksWritten):
            names = (message.request.request_id,)
        elif isinstance(message, BatchGranted):
            names = [one.request.request_id for one in message.handoffs]
        return [self.prepared[name] for name in names if name in self.prepared]

    async def finish(self, name: str) -> None:
        self.prepared[name].set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_what_needs_nothing_is_delivered_at_once() -> None:
    harness = Harness()
    harness.prepared["ready"] = Future()
    harness.prepared["ready"].set_result(None)
    messages = [arriving("plain"), arriving("ready"), AbortRequest(RequestId("unknown"))]
    for message in messages:
        harness.held.take("router", message)
    assert harness.delivered == [("router", message) for message in messages]


async def test_messages_about_a_request_that_waits_stay_behind_it() -> None:
    harness = Harness()
    harness.prepared["slow"] = Future()
    slow, other, abort = arriving("slow"), arriving("other"), AbortRequest(RequestId("slow"))
    for message in (slow, abort, other):
        harness.held.take("router", message)
    assert harness.delivered == [("router", other)]
    await harness.finish("slow")
    assert harness.delivered == [("router", other), ("router", slow), ("router", abort)]
    harness.held.take("router", abort)
    assert harness.delivered[-1] == ("router", abort)
    assert len(harness.delivered) == 4


async def test_granted_requests_wait_for_all_and_the_grants_of_a_pool_stay_in_order() -> None:
    harness = Harness()
    harness.prepared = {"r1": Future(), "r2": Future()}
    first = BatchGranted(BatchId(1), (handoff(request("r1"), 11), handoff(request("r2"), 12)))
    joining = BatchGranted(BatchId(2), (handoff(request("r3"), 13),), joins=BatchId(1))
    abort, other = AbortRequest(RequestId("r2")), BatchGranted(BatchId(3), (handoff(request("r4"), 14),))
    for peer, message in (("pool", first), ("pool", joining), ("router", abort), ("far", other)):
        harness.held.take(peer, message)
    assert harness.delivered == [("far", other)]
    await harness.finish("r2")
    assert harness.delivered == [("far", other)]
    await harness.finish("r1")
    assert harness.delivered[1:] == [("pool", first), ("pool", joining), ("router", abort)]


async def test_a_request_that_moves_here_waits_too() -> None:
    harness = Harness()
    harness.prepared["r1"] = Future()
    written = BlocksWritten(LeaseId(1), BlockCopy(1, 4, ()), 1, request("r1"), (7,))
    cancelled = CancelReservation(RequestId("r1"), 1)
    harness.held.take("decode-1", written)
    harness.held.take("decode-1", cancelled)
    assert harness.delivered == []
    await harness.finish("r1")
    assert harness.delivered == [("decode-1", written), ("decode-1", cancelled)]


async def test_messages_of_a_lost_peer_are_dropped() -> None:
    harness = Harness()
    harness.prepared["slow"] = Future()
    harness.held.take("router", arriving("slow"))
    harness.held.drop("router")
    harness.held.take("router", arriving("slow"))  # of the router that came back
    await harness.finish("slow")
    assert harness.delivered == [("router", arriving("slow"))]


async def test_a_message_whose_request_has_ended_is_dropped() -> None:
    harness = Harness()
    harness.prepared["slow"] = Future()
    abort = AbortRequest(RequestId("slow"))
    harness.held.take("router", arriving("slow"))
    harness.prepared["slow"].cancel()
    harness.held.take("router", abort)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert harness.delivered == [("router", abort)]
