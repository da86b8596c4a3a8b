"""A gateway without HTTP, for tests of the components behind one."""

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.core.ids import RequestId
from alignedserve.core.picture import Picture, whole_runs
from alignedserve.core.request import (
    FinishReason,
    LoraAdapter,
    Request,
    RequestClass,
    SamplingParams,
    Slo,
    TokenLogprob,
)
from alignedserve.messages.gateways import (
    AbortRequest,
    ClusterStatus,
    PromptScored,
    RequestFailed,
    RequestInterrupted,
    RequestRejected,
    ResumeRequest,
    SubmitRequest,
    TokenDelta,
    TokensEmitted,
)
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import GatewayInbound
from alignedserve.messages.request_notes import AskTimeline, RequestNote, RequestsNoted, TimelineTold
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.addresses import ROUTER
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity, Peer


@dataclass
class Answer:
    """The messages that the gateway got for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes = b""
    finish_reason: FinishReason | None = None
    failure: RequestFailed | RequestRejected | None = None
    num_repeats: int = 0
    compute_s: float = 0.0  # that workers told
    early: dict[int, TokenDelta] = field(default_factory=dict)  # behind a gap, by first index
    last_worker: str | None = None  # whose tokens came last
    done: asyncio.Event = field(default_factory=asyncio.Event)
    first_token: asyncio.Event = field(default_factory=asyncio.Event)


class ClientGateway:
    """Submits requests and collects what comes back, resuming what is interrupted or lost."""

    def __init__(self, address: str, router_at: str, identity: Identity) -> None:
        self.address = address
        self.status: ClusterStatus | None = None
        self.answers: dict[str, Answer] = {}
        self._requests: dict[str, Request] = {}
        self._aborted: set[str] = set()
        self._router_at = router_at
        self._board = LinkManager(identity, Codec(GatewayInbound), self)
        self._numbers = itertools.count()
        self.linked = asyncio.Event()
        self.notes: list[tuple[str, RequestNote]] = []  # with the names of those that sent them

    async def start(self) -> None:
        await self._board.listen(self.address)
        self._board.dial(self._router_at)
        async with asyncio.timeout(20):
            await self.linked.wait()

    def submit(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        slo: Slo | None = None,
        prefix_root: bytes = b"",
        adapter: LoraAdapter | None = None,
        pictures: tuple[Picture, ...] = (),
        request_class: RequestClass = RequestClass.REAL_TIME,
    ) -> Answer:
        request_id = RequestId(f"r{next(self._numbers)}")
        request = Request(
            request_id,
            tuple(prompt),
            sampling,
            self.address,
            time.monotonic(),
            slo=Slo() if slo is None else slo,
            prefix_root=prefix_root,
            adapter=adapter,
            pictures=pictures,
            whole_runs=whole_runs(pictures),
            request_class=request_class,
        )
        self._requests[request_id] = request
        self.answers[request_id] = Answer()
        self._board.send(ROUTER, SubmitRequest(request))
        return self.answers[request_id]

    def abort(self, answer: Answer) -> None:
        request_id = next(key for key, value in self.answers.items() if value is answer)
        self._aborted.add(request_id)
        self._board.send(ROUTER, AbortRequest(RequestId(request_id)))

    async def generate(self, prompt: list[int], sampling: SamplingParams, timeout_s: float = 20.0) -> Answer:
        answer = self.submit(prompt, sampling)
        async with asyncio.timeout(timeout_s):
            await answer.done.wait()
        return answer

    async def idle(self, timeout_s: float = 10.0) -> ClusterStatus:
        """Wait until nothing is held anywhere, by a status that comes from now on."""
        self.status = None
        async with asyncio.timeout(timeout_s):
            while True:
                status = self.status
                if status is not None and _is_idle(status):
                    return status
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self._board.close()

    def on_linked(self, peer: Peer) -> None:
        """A router that comes (back) knows nothing of what is open."""
        if peer.role is Role.ROUTER:
            self.linked.set()
            self._resume(self._open())

    def on_lost(self, peer: Peer) -> None:
        """Drop the last messages of a lost worker, which may not have arrived."""
        if peer.role is Role.ROUTER:
            self.linked.clear()
            self.status = None
        else:
            self._resume(key for key in self._open() if self.answers[key].last_worker in (None, peer.name))

    def on_message(self, peer: Peer, message: Message) -> None:
        match message:
            case TokensEmitted():
                for delta, compute_s in zip(message.deltas, message.compute_s, strict=True):
                    self.answers[delta.request_id].compute_s += compute_s
                    if delta.token_ids or delta.finish_reason is not None:
                        self._take(self.answers[delta.request_id], delta, peer.name)
            case PromptScored():
                self.answers[message.request_id].prompt_scores += message.entries
                self.answers[message.request_id].compute_s += message.compute_s
            case RequestFailed() | RequestRejected():
                self.answers[message.request_id].failure = message
                self.answers[message.request_id].done.set()
            case RequestInterrupted() if message.request_id in self._open():
                self._resume([message.request_id])
            case RequestInterrupted():
                self._board.send(ROUTER, AbortRequest(message.request_id))
            case ClusterStatus():
                self.status = message
            case RequestsNoted():
                self.notes += [(peer.name, note) for note in message.notes]
            case AskTimeline():
                self._board.send(peer.name, TimelineTold(message.number, message.asker))

    def _open(self) -> list[str]:
        return [key for key, answer in self.answers.items() if not answer.done.is_set() and key not in self._aborted]

    def _resume(self, request_ids: Iterable[str]) -> None:
        for key in request_ids:
            self._board.send(ROUTER, ResumeRequest(self._requests[key], tuple(self.answers[key].token_ids)))

    @staticmethod
    def _take(answer: Answer, delta: TokenDelta, worker: str) -> None:
        answer.last_worker = worker
        answer.early[delta.first_index] = delta
        answer.embedding = delta.embedding or answer.embedding
        while answer.early and min(answer.early) <= len(answer.token_ids) and not answer.done.is_set():
            following = answer.early.pop(min(answer.early))
            fresh = len(answer.token_ids) - following.first_index
            answer.num_repeats += min(fresh, len(following.token_ids))
            answer.token_ids += following.token_ids[fresh:]
            answer.logprobs += following.logprobs[fresh:]
            answer.first_token.set()
            is_repeat = fresh > len(following.token_ids)
            if following.finish_reason is not None and not is_repeat:
                answer.finish_reason = following.finish_reason
                answer.done.set()


def _is_idle(status: ClusterStatus) -> bool:
    stages = (status.num_queued, status.num_prefilling, status.num_pooled, status.num_decoding)
    return not any(stages) and status.num_pool_blocks_used == 0 and status.num_worker_blocks_used == 0
