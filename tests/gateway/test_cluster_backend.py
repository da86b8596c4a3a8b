"""The backend of a cluster against a hand-made router and worker over real links."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.api.backend import cluster as cluster_backend
from alignedserve.api.backend import cluster as open_request
from alignedserve.api.errors import (
    GenerationFailed,
    GrammarFailed,
    Overloaded,
    ResourceUnavailable,
    TimedOut,
    Unavailable,
    Unservable,
    error_headers,
    http_error_of,
)
from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import RequestId
from alignedserve.core.picture import DIGEST_BYTES, Picture
from alignedserve.core.request import FinishReason, RequestClass, TokenLogprob
from alignedserve.messages.gateways import (
    AbortRequest,
    PromptScored,
    RequestFailed,
    RequestInterrupted,
    RequestRejected,
    ResumeRequest,
    SubmitRequest,
)
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import RouterInbound
from alignedserve.messages.wire import Codec
from alignedserve.process import links
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity
from tests.harnesses.clusters.cluster_backend import SECRET, STATUS, Recorder, cluster, failure_of, read
from tests.support.waiting import holds


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
            FailureKind.GRAMMAR: GrammarFailed,
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


async def test_thousands_that_wait_for_an_hour_are_not_sent_again_every_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_request, "_RESEND_AFTER_S", 0.05)
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
    monkeypatch.setattr(open_request, "_RESEND_AFTER_S", 0.3)
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


async def test_what_a_lost_worker_may_have_sent_last_is_asked_for_until_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router may take the request for served until it hears that the worker has ended it."""
    monkeypatch.setattr(open_request, "_RESEND_SOON_S", 0.02)
    monkeypatch.setattr(cluster_backend, "_MAX_CHECK_PAUSE_S", 0.01)
    async with cluster(tmp_path) as harness:
        stream = harness.submit()
        harness.emit(0, 11)
        await anext(stream)
        await harness.worker.close()
        for resumed in await harness.received.wait_for(ResumeRequest, 2):
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


async def test_a_router_that_is_back_is_told_of_no_more_at_once_than_a_link_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more than 256 MiB the link ended before a byte was written, each time anew."""
    monkeypatch.setitem(cluster_backend._MOST_BYTES_AT_ONCE, RequestClass.BEST_EFFORT, 160)
    monkeypatch.setattr(cluster_backend, "_MAX_CHECK_PAUSE_S", 0.05)
    async with cluster(tmp_path) as harness:
        for number in range(4):
            harness.submit(name=f"flex{number}", request_class=RequestClass.BEST_EFFORT)
        harness.submit(name="chat")
        await harness.received.wait_for(SubmitRequest, 5)
        harness.router.disconnect("gateway-0")
        found = await harness.received.wait_for(ResumeRequest, 5)  # the others soon
        sent = [one.request.request_id for one in found if isinstance(one, ResumeRequest)]
        assert sent[0] == "chat"
        assert {*sent} == {"chat", "flex0", "flex1", "flex2", "flex3"}


@pytest.mark.parametrize("request_class", list(RequestClass))
@pytest.mark.parametrize("is_router_lost", [True, False])
async def test_requests_with_pictures_are_resumed_a_few_at_a_time(
    is_router_lost: bool, request_class: RequestClass, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once they are more than a link takes, which ended it, each time anew."""
    monkeypatch.setattr(links, "_MAX_BACKLOG_BYTES", 100_000)
    monkeypatch.setattr(cluster_backend, "_MOST_BYTES_AT_ONCE", dict.fromkeys(RequestClass, 50_000))
    monkeypatch.setattr(cluster_backend, "_MAX_CHECK_PAUSE_S", 0.02)
    names = [f"r{number}" for number in range(12)]
    async with cluster(tmp_path) as harness:
        for number, name in enumerate(names):
            picture = Picture(bytes(20_000), bytes(DIGEST_BYTES), ((0, 2),))
            harness.submit(name=name, request_class=request_class, pictures=(picture,))
            await harness.received.wait_for(SubmitRequest, 1 + number)
        if is_router_lost:
            harness.router.disconnect("gateway-0")
        else:
            for name in names:
                harness.send_from_router(RequestInterrupted(RequestId(name)))
        found = await harness.received.wait_for(ResumeRequest, len(names))
    assert sorted(one.request.request_id for one in found if isinstance(one, ResumeRequest)) == sorted(names)


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


async def test_chat_is_refused_at_once_while_no_worker_starts_and_documents_wait(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        chat = harness.submit(name="chat")
        document = harness.submit(name="flex", request_class=RequestClass.BEST_EFFORT)
        harness.backend.is_failing = True
        harness.submit(name="served")  # one worker fails, the other serves
        lost = replace(STATUS, num_decode_workers=0)
        harness.send_from_router(lost)
        failure = await failure_of(chat)
        assert (http_error_of(failure).status, error_headers(failure)) == (503, {"Retry-After": "10"})
        await harness.received.wait_for(AbortRequest, 2)
        with pytest.raises(Unavailable, match="No worker of this model serves"):
            harness.submit(name="later")
        harness.submit(name="flex2", request_class=RequestClass.BEST_EFFORT)
        harness.send_from_router(STATUS)
        await holds(lambda: harness.backend.status() == STATUS)
        answered = harness.submit(name="back")  # even before the driver says that it serves again
        for name, stream in (("back", answered), ("flex", document)):
            harness.emit(0, 11, end=True, name=name)
            assert (await read(stream))[0] == [11]


async def test_chat_that_comes_long_after_the_last_worker_was_lost_is_refused_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, first_token_timeout_s=0.2) as harness:
        harness.send_from_router(replace(STATUS, num_prefill_workers=0))
        await holds(lambda: harness.backend.status() != STATUS)
        assert isinstance(await failure_of(harness.submit(name="first")), TimedOut)  # the worker might have come back
        with pytest.raises(Unavailable):
            harness.submit(name="later")


async def test_stopping_ends_what_is_open(tmp_path: Path) -> None:
    async with cluster(tmp_path) as harness:
        stream = harness.submit()
        harness.backend.stop()
        assert isinstance(await failure_of(stream), Unavailable)
