"""Deployments for tests of gateways: what a driver lists, and a router and a worker that echo prompts over links."""

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

from alignedserve.api.backend.connection import ClusterLinks
from alignedserve.config.sections import ModelSectionConfig, PrefixCacheConfig
from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason
from alignedserve.messages.gateways import (
    AbortRequest,
    ClusterStatus,
    RequestFailed,
    ResumeRequest,
    SubmitRequest,
    TokenDelta,
    TokensEmitted,
)
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import RouterInbound
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.addresses import ROUTER, AddressBook, deployed_name
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity, Peer
from alignedserve.runtime.model.served_model import ServedDeployment, ServedModel, resolve_model
from tests.gateway.support import EOS, tokenizer_folder
from tests.harnesses.scripted_backend import IDLE_STATUS
from tests.support.models.tiny_llama import TINY_LLAMA

SECRET = b"s" * 32


@cache
def served_model(name: str = "tiny", folder: Path | None = None) -> ServedModel:
    """A model of the gateway tests' tokenizer, never computed."""
    folder = folder or tokenizer_folder()
    config = {**TINY_LLAMA, "vocab_size": 512, "eos_token_id": EOS, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    return resolve_model(ModelSectionConfig(path=str(folder), random_weights=True, served_model_name=name))


def deployed(name: str = "tiny", deployment_id: str = "", **fields: Any) -> ServedDeployment:
    """A deployment as a driver lists it, without a prefix cache."""
    folder: Path | None = fields.pop("folder", None)
    router = deployed_name(ROUTER, deployment_id)
    fields = {"prefix_cache": PrefixCacheConfig(enabled=False), "block_size": 8, **fields}
    return ServedDeployment(served_model(name, folder), deployment_id=deployment_id, router=router, **fields)


def gateway_links(folder: Path, name: str = "gateway-0") -> ClusterLinks:
    """The links of a gateway whose cluster's sockets are in this folder."""
    return ClusterLinks(Identity(Role.GATEWAY, name, SECRET), name, AddressBook(folder))


class EchoingDeployment:
    """Router and worker of one deployment: every request is answered with its prompt's tokens, over links."""

    def __init__(self, folder: Path, deployment_id: str = "", token_delay_s: float = 0.0) -> None:
        book = AddressBook(folder)
        router, worker = deployed_name(ROUTER, deployment_id), deployed_name("decode-0", deployment_id)
        self.router = LinkManager(Identity(Role.ROUTER, router, SECRET), Codec(RouterInbound), self, book)
        self.worker = LinkManager(Identity(Role.DECODE_WORKER, worker, SECRET), Codec(RouterInbound), self, book)
        self.submitted: list[RequestId] = []  # but for the probes' tokens
        self.aborted: list[RequestId] = []
        self.token_delay_s = token_delay_s
        self.is_ready = True  # False: it has no workers
        self.fault = ""  # for which every request fails inside it; empty: none does
        self._name = router
        self._running: dict[RequestId, asyncio.Task[None]] = {}

    async def start(self) -> "EchoingDeployment":
        await self.router.listen(self._name)
        return self

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await self.router.close()
        await self.worker.close()

    def become_ready(self) -> None:
        """Report a worker from now on."""
        self.is_ready = True
        self.report(IDLE_STATUS)

    def report(self, status: ClusterStatus) -> None:
        """Report this to all gateways."""
        for peer in self.router.peers():
            if peer.role is Role.GATEWAY:
                self.router.send(peer.name, status)

    def on_linked(self, peer: Peer) -> None:
        if peer.role is Role.GATEWAY and self.is_ready:
            self.router.send(peer.name, IDLE_STATUS)

    def on_message(self, peer: Peer, message: Message) -> None:
        match message:
            case SubmitRequest() if self.fault:
                failed = RequestFailed(message.request.request_id, FailureKind.INTERNAL, self.fault)
                self.router.send(peer.name, failed)
            case SubmitRequest() | ResumeRequest():
                request_id = message.request.request_id
                if request_id not in self._running:
                    if not request_id.startswith("canary"):
                        self.submitted.append(request_id)
                    self._running[request_id] = asyncio.create_task(self._answer(message))
            case AbortRequest() if message.request_id in self._running:
                self.aborted.append(message.request_id)
                self._running.pop(message.request_id).cancel()

    def on_lost(self, peer: Peer) -> None: ...

    async def _answer(self, message: SubmitRequest | ResumeRequest) -> None:
        request = message.request
        num_tokens = min(request.prompt_len, request.sampling.max_tokens)
        for place, token_id in enumerate(request.prompt_token_ids[:num_tokens]):
            await asyncio.sleep(self.token_delay_s)
            reason = FinishReason.STOP if place + 1 == num_tokens else None
            delta = TokenDelta(request.request_id, place, (token_id,), (), reason)
            self.worker.send_to(request.reply_to, TokensEmitted((delta,)))
        del self._running[request.request_id]
