"""Messages wait for what is prepared for them: each request's in order, those of others never behind them."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from alignedserve.core.ids import BatchId, LeaseId, RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.caches import BatchGranted, BlockCopy, BlocksWritten, CancelReservation
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest
from alignedserve.process.logic_driver import HeldMessages
from tests.support.samples import handoff, request


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
