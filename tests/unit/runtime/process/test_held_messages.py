"""Messages wait for what is prepared for them: each request's in order, those of others never behind them."""

import asyncio
from concurrent.futures import Future
from typing import Any

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, SamplingParams
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest
from alignedserve.runtime.process.held_messages import HeldMessages


def arriving(name: str) -> PrefillRequest:
    return PrefillRequest(Request(RequestId(name), (1, 2), SamplingParams(), "gateway", 0.0), 1)


class Harness:
    def __init__(self) -> None:
        self.prepared: dict[str, Future[Any]] = {}
        self.delivered: list[tuple[str, Message]] = []
        self.held = HeldMessages(self._prepare, lambda peer, message: self.delivered.append((peer, message)))

    def _prepare(self, message: Message) -> "Future[Any] | None":
        return self.prepared.get(message.request.request_id) if isinstance(message, PrefillRequest) else None

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


async def test_messages_of_a_lost_peer_are_dropped() -> None:
    harness = Harness()
    harness.prepared["slow"] = Future()
    harness.held.take("router", arriving("slow"))
    harness.held.drop("router")
    harness.held.take("router", arriving("slow"))  # of the router that came back
    await harness.finish("slow")
    assert harness.delivered == [("router", arriving("slow"))]


async def test_nothing_is_delivered_after_the_end() -> None:
    harness = Harness()
    harness.prepared["slow"] = Future()
    harness.held.take("router", arriving("slow"))
    harness.held.close()
    await harness.finish("slow")
    assert harness.delivered == []
