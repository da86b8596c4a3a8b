"""One gateway's backend of a deployment, beside a router and a worker that a test plays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from alignedserve.api.backend.cluster import ClusterBackend
from alignedserve.api.backend.connection import ClusterConnection, ClusterLinks
from alignedserve.api.backend.interface import GeneratedTokens, RequestStream
from alignedserve.api.errors import GenerationError
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, SamplingParams
from alignedserve.messages.gateways import ClusterStatus, TokenDelta, TokensEmitted
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import RouterInbound
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.addresses import AddressBook
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity, Peer
from tests.support.waiting import holds

SECRET = b"s" * 32
STATUS = ClusterStatus(1, 2, 3, 4, 1, 1, 10, 5, 20, 10, 0, 7, 0, latest_attempt=65_538)


@dataclass
class Recorder:
    """A peer that keeps what it is sent."""

    inbox: list[Message] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def on_linked(self, peer: Peer) -> None:
        self.changed.set()

    def on_message(self, peer: Peer, message: Message) -> None:
        self.inbox.append(message)
        self.changed.set()

    def on_lost(self, peer: Peer) -> None:
        self.changed.set()

    def of(self, kind: type[Message], after: Message | None = None) -> list[Message]:
        """Return the messages of a kind; `after`: those that came after this one."""
        begin = 0 if after is None else self.inbox.index(after) if after in self.inbox else len(self.inbox)
        return [message for message in self.inbox[begin:] if isinstance(message, kind)]

    async def wait_for(self, kind: type[Message], count: int = 1, after: Message | None = None) -> list[Message]:
        async with asyncio.timeout(20):
            while len(found := self.of(kind, after)) < count:
                self.changed.clear()
                await self.changed.wait()
        return found


@dataclass
class ClusterHarness:
    """One gateway backend, one router, one worker."""

    backend: ClusterBackend
    router: LinkManager
    worker: LinkManager
    received: Recorder
    gateway_address: str
    router_address: str

    def submit(
        self, *, max_tokens: int = 8, num_prompt_logprobs: int | None = None, name: str = "r", **fields: Any
    ) -> RequestStream:
        sampling = SamplingParams(max_tokens=max_tokens, num_prompt_logprobs=num_prompt_logprobs)
        return self.backend.submit(Request(RequestId(name), (5, 6, 7), sampling, self.gateway_address, 0.0, **fields))

    def emit(self, first_index: int, *token_ids: int, end: bool = False, name: str = "r") -> None:
        finish_reason = FinishReason.STOP if end else None
        delta = TokenDelta(RequestId(name), first_index, token_ids, (), finish_reason)
        self.worker.send_to(self.gateway_address, TokensEmitted((delta,)))

    def send_from_router(self, message: Message) -> None:
        assert self.router.send("gateway-0", message)


@asynccontextmanager
async def cluster(folder: Path, *, has_router: bool = True, **config: float) -> AsyncIterator[ClusterHarness]:
    router_at, gateway_at = f"unix:{folder}/router.sock", f"unix:{folder}/gateway-0.sock"
    received = Recorder()
    router = LinkManager(Identity(Role.ROUTER, "router", SECRET), Codec(RouterInbound), received)
    worker = LinkManager(Identity(Role.DECODE_WORKER, "decode-0", SECRET), Codec(RouterInbound), Recorder())
    if has_router:
        await router.listen(router_at)
    identity = Identity(Role.GATEWAY, "gateway-0", SECRET)
    connection = ClusterConnection(ClusterLinks(identity, "gateway-0", AddressBook(folder)))
    await connection.start()
    backend = ClusterBackend(connection, GatewayConfig(**config))  # type: ignore[arg-type]
    backend.start()
    harness = ClusterHarness(backend, router, worker, received, gateway_at, router_at)
    if has_router:
        await holds(lambda: bool(router.peers()))
        harness.send_from_router(STATUS)
        await holds(lambda: backend.status() is not None)
    try:
        yield harness
    finally:
        backend.stop()
        await connection.close()
        await harness.router.close()
        await worker.close()


async def read(stream: RequestStream) -> tuple[list[int], FinishReason | None, list[GeneratedTokens]]:
    async with asyncio.timeout(20):
        outputs = [output async for output in stream]
    return [token for output in outputs for token in output.token_ids], outputs[-1].finish_reason, outputs


async def failure_of(stream: RequestStream) -> GenerationError:
    async with asyncio.timeout(20):
        with pytest.raises(GenerationError) as caught:
            async for _ in stream:
                pass
    return caught.value
