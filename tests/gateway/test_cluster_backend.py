"""The backend of a cluster against a hand-made router and worker over real links."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from alignedserve.api.backend import cluster as cluster_backend
from alignedserve.api.backend.cluster import ClusterBackend
from alignedserve.api.backend.connection import ClusterConnection, ClusterLinks
from alignedserve.api.backend.interface import GeneratedTokens, RequestStream
from alignedserve.api.errors import (
    GenerationError,
    GenerationFailed,
    Overloaded,
    ResourceUnavailable,
    TimedOut,
    Unavailable,
    Unservable,
)
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, Request, RequestClass, SamplingParams, Slo, TokenLogprob
from alignedserve.messages.fields import FailureKind
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

    async def wait_for(self, kind: type[Message], count: int = 1) -> list[Message]:
        async with asyncio.timeout(20):
            while len(found := [message for message in self.inbox if isinstance(message, kind)]) < count:
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


async def test_tokens_come_straight_from_the_worker(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit()
        (submitted,) = await harness.received.wait_for(SubmitRequest)
        assert isinstance(submitted, SubmitRequest)
        assert submitted.request.reply_to == harness.gateway_address
        harness.emit(0, 11)
        harness.emit(1, 12, 13)
        harness.emit(3, 14, end=True)
        token_ids, reason, _ = await read(stream)
        assert (token_ids, reason) == ([11, 12, 13, 14], FinishReason.STOP)
        assert harness.backend.status() == STATUS


async def test_order_repeats_and_gaps(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit()
        harness.emit(4, 15, 16, end=True)  # behind a gap, with the end
        harness.emit(0, 11, 12)
        harness.emit(1, 12, 13)  # overlaps
        harness.emit(0, 11, 12, 13)  # a repeat
        harness.emit(2, 13, end=False)
        harness.emit(0, 99, name="another worker")
        first = await anext(stream)
        tokens = list(first.token_ids)
        harness.emit(2, 13, 14)
        rest, reason, _ = await read(stream)
        assert tokens + rest == [11, 12, 13, 14, 15, 16]
        assert reason is FinishReason.STOP


async def test_no_token_is_delivered_behind_a_gap(tmp_path: Path) -> None:
    async with cluster(tmp_path, token_timeout_s=0.3) as harness:
        stream = harness.submit()
        harness.emit(0, 11)
        harness.emit(2, 13, end=True)
        assert (await anext(stream)).token_ids == (11,)
        assert isinstance(await failure_of(stream), TimedOut)
        await harness.received.wait_for(AbortRequest)


async def test_tokens_after_the_end_are_ignored(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit()
        harness.emit(0, 11, end=True)
        harness.emit(1, 12)
        harness.emit(0, 11, end=True)
        assert (await read(stream))[0] == [11]


async def test_prompt_logprobs_come_first_and_in_order(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit(num_prompt_logprobs=0)
        harness.emit(0, 11, end=True)
        for position in (2, 1, 1):
            scored = PromptScored(RequestId("r"), position, (TokenLogprob(position, -1.0),))
            harness.worker.send_to(harness.gateway_address, scored)
        token_ids, reason, outputs = await read(stream)
        assert [score.token_id for score in outputs[0].prompt_logprobs] == [1, 2]
        assert (token_ids, reason) == ([11], FinishReason.STOP)
        assert sum(harness.backend.num_answers().values()) == 1


async def test_scores_alone_end_a_request_for_no_tokens(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit(max_tokens=0, num_prompt_logprobs=0)
        scores = (TokenLogprob(6, -1.0), TokenLogprob(7, -2.0))
        harness.worker.send_to(harness.gateway_address, PromptScored(RequestId("r"), 1, scores))
        token_ids, reason, _ = await read(stream)
        assert (token_ids, reason) == ([], FinishReason.LENGTH)
        assert sum(harness.backend.num_answers().values()) == 1


async def test_rejections_and_failures(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit()
        harness.send_from_router(RequestRejected(RequestId("r"), "the queue is full", 7.2))
        error = await failure_of(stream)
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == 7.2
        expected = {
            FailureKind.OVERLOADED: Overloaded,
            FailureKind.WORKER_LOST: Unavailable,
            FailureKind.INTERNAL: GenerationFailed,
            FailureKind.UNSERVABLE: Unservable,
        }
        for kind, error_class in expected.items():
            stream = harness.submit(name=kind.value)
            harness.send_from_router(RequestFailed(RequestId(kind.value), kind, "why"))
            assert type(await failure_of(stream)) is error_class


async def test_a_failure_comes_after_the_tokens_before_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit()
        harness.emit(0, 11)
        assert (await anext(stream)).token_ids == (11,)
        harness.send_from_router(RequestFailed(RequestId("r"), FailureKind.WORKER_LOST, "gone"))
        assert isinstance(await failure_of(stream), Unavailable)


async def test_abort_reaches_the_router_once(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        harness.submit()
        harness.backend.abort(RequestId("r"))
        harness.backend.abort(RequestId("r"))
        harness.backend.abort(RequestId("unknown"))
        harness.submit(name="second")
        await harness.received.wait_for(SubmitRequest, 2)
        assert harness.received.inbox.count(AbortRequest(RequestId("r"))) == 1


async def test_no_first_token_in_time(tmp_path: Path) -> None:
    async with cluster(tmp_path, first_token_timeout_s=0.2) as harness:
        assert isinstance(await failure_of(harness.submit()), TimedOut)
        await harness.received.wait_for(AbortRequest)


async def test_best_effort_may_be_silent_for_longer_than_chat_and_until_its_deadline(tmp_path: Path) -> None:
    async with cluster(tmp_path, first_token_timeout_s=0.1, token_timeout_s=0.1, best_effort_timeout_s=0.3) as harness:
        flex = harness.submit(name="flex", request_class=RequestClass.BEST_EFFORT)
        slo = Slo(deadline_s=60.0)
        line = harness.submit(name="line", request_class=RequestClass.BEST_EFFORT, slo=slo)
        assert isinstance(await failure_of(harness.submit()), TimedOut)
        harness.emit(0, 11, name="flex")
        assert (await anext(flex)).token_ids == (11,)
        assert isinstance(await failure_of(flex), TimedOut)
        harness.emit(0, 11, end=True, name="line")
        assert (await anext(line)).token_ids == (11,)


async def test_thousands_that_wait_for_an_hour_are_not_sent_again_every_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_backend, "_RESEND_AFTER_S", 0.05)
    monkeypatch.setattr(cluster_backend, "_MAX_CHECK_PAUSE_S", 0.01)
    async with cluster(tmp_path) as harness:
        harness.submit(name="flex", request_class=RequestClass.BEST_EFFORT)
        harness.submit(name="chat")
        sent = [one.request.request_id for one in await harness.received.wait_for(ResumeRequest, 20)]  # type: ignore[attr-defined]
    # After 1, 3, 7 and 15 times as long, while chat was sent some fifteen times.
    assert 2 <= sent.count(RequestId("flex")) <= 5


async def test_of_many_that_wait_few_are_sent_again_at_once_and_chat_is_not_among_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_backend, "_RESEND_AFTER_S", 0.3)
    monkeypatch.setattr(cluster_backend, "_MAX_CHECK_PAUSE_S", 0.1)
    monkeypatch.setattr(cluster_backend, "_MOST_RESENT", 4)
    async with cluster(tmp_path) as harness:
        for number in range(20):
            harness.submit(name=f"flex{number:02}", request_class=RequestClass.BEST_EFFORT)
        harness.submit(name="chat")
        found = await harness.received.wait_for(ResumeRequest, 17)  # of four looks, four and the chat
        sent = [one.request.request_id for one in found if isinstance(one, ResumeRequest)]
        assert sent[:4] == ["flex00", "flex01", "flex02", "flex03"]
        assert "chat" in sent[4:17]  # on a busy machine it may be due a look later; among the others it is the last
        await harness.received.wait_for(ResumeRequest, 21)  # the others come with the next looks


async def test_best_effort_is_rejected_as_a_resource_that_is_not_there(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit(request_class=RequestClass.BEST_EFFORT)
        harness.send_from_router(RequestRejected(RequestId("r"), "the queue is full", 7.2))
        assert isinstance(await failure_of(stream), ResourceUnavailable)


async def test_an_interrupted_request_goes_on_where_the_client_is(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit()
        harness.emit(0, 11, 12)
        await anext(stream)
        harness.send_from_router(RequestInterrupted(RequestId("r")))
        harness.send_from_router(RequestInterrupted(RequestId("long gone")))
        (resumed,) = await harness.received.wait_for(ResumeRequest)
        assert isinstance(resumed, ResumeRequest)
        assert resumed.generated_token_ids == (11, 12)
        assert (await harness.received.wait_for(AbortRequest)) == [AbortRequest(RequestId("long gone"))]
        harness.emit(2, 13, end=True)
        assert (await read(stream))[0] == [13]


async def test_what_a_lost_worker_may_have_sent_last_is_asked_for(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit()
        harness.emit(0, 11)
        await anext(stream)
        await harness.worker.close()
        (resumed,) = await harness.received.wait_for(ResumeRequest)
        assert isinstance(resumed, ResumeRequest)
        assert (resumed.generated_token_ids, resumed.holder) == ((11,), "")


async def test_a_lost_router(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        waiting, streaming = harness.submit(name="waiting"), harness.submit(name="streaming")
        harness.emit(0, 11, name="streaming")
        await anext(streaming)
        await harness.router.close()
        await holds(lambda: harness.backend.status() is None)
        later = harness.submit(name="later")
        harness.backend.abort(RequestId("unknown"))
        received = Recorder()
        harness.router = LinkManager(Identity(Role.ROUTER, "router", SECRET), Codec(RouterInbound), received)
        await harness.router.listen(harness.router_address)
        resumed = [
            message for message in await received.wait_for(ResumeRequest, 2) if isinstance(message, ResumeRequest)
        ]
        assert [one.request.request_id for one in resumed] == ["waiting", "streaming"]
        assert [one.generated_token_ids for one in resumed] == [(), (11,)]
        assert [one.holder for one in resumed] == ["", "decode-0"]  # who may go on with it
        (submitted,) = await received.wait_for(SubmitRequest)  # it may be rejected, as the queue may be full
        assert isinstance(submitted, SubmitRequest)
        assert submitted.request.request_id == "later"
        assert {one.latest_attempt for one in resumed} == {STATUS.latest_attempt}
        harness.emit(1, 12, end=True, name="streaming")
        harness.emit(0, 21, end=True, name="waiting")
        assert (await read(streaming))[0] == [12]
        assert (await read(waiting))[0] == [21]
        harness.emit(0, 31, end=True, name="later")
        assert (await read(later))[0] == [31]


async def test_before_the_first_router_requests_are_told_to_come_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, has_router=False) as harness:
        with pytest.raises(Unavailable):
            harness.submit()


async def test_a_router_that_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_backend, "_ROUTER_RETURNS_S", 0.1)
    async with cluster(tmp_path) as harness:
        waiting, streaming = harness.submit(name="waiting"), harness.submit(name="streaming")
        harness.emit(0, 11, name="streaming")
        await anext(streaming)
        await harness.router.close()
        assert isinstance(await failure_of(waiting), Unavailable)
        with pytest.raises(Unavailable):
            harness.submit(name="later")
        harness.emit(1, 12, end=True, name="streaming")
        assert (await read(streaming))[0] == [12]


async def test_stopping_ends_what_is_open(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit()
        harness.backend.stop()
        assert isinstance(await failure_of(stream), Unavailable)
