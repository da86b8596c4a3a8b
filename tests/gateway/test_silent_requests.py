"""For how long a request may be silent: the backend of a cluster against a hand-made router and worker."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve.api.backend import cluster as cluster_backend
from alignedserve.api.backend import cluster as open_request
from alignedserve.api.errors import TimedOut
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.gateways import AbortRequest, ResumeRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import RouterInbound
from alignedserve.messages.wire import Codec
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity
from alignedserve.scheduling.policies.aligned_slo import AlignedSloConfig
from tests.harnesses.clusters.cluster_backend import SECRET, Recorder, cluster, failure_of, read
from tests.support.waiting import holds


async def test_no_token_is_delivered_behind_a_gap(tmp_path: Path) -> None:
    async with cluster(tmp_path, token_timeout_s=0.3) as harness:
        stream = harness.submit()
        harness.emit(0, 11)
        harness.emit(2, 13, end=True)
        assert (await anext(stream)).token_ids == (11,)
        assert isinstance(await failure_of(stream), TimedOut)
        await harness.received.wait_for(AbortRequest)


async def test_tokens_lost_with_a_link_are_computed_again_though_their_worker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router leaves such a request where it is, so its stream once stood still until the end of its answer."""
    monkeypatch.setattr(open_request, "_RESEND_SOON_S", 0.02)
    monkeypatch.setattr(cluster_backend, "_MAX_CHECK_PAUSE_S", 0.01)
    async with cluster(tmp_path) as harness:
        stream = harness.submit(max_tokens=1000)
        harness.emit(0, 11)
        assert (await anext(stream)).token_ids == (11,)
        harness.emit(5, 16)  # 1 to 4 were under way when the link was cut
        await harness.received.wait_for(ResumeRequest)
        assert not harness.received.of(AbortRequest)  # they may still come, or their worker may be the one that is lost
        for index in range(6, 900):
            harness.emit(index, 11 + index)
            await asyncio.sleep(0.001)
            if harness.received.of(AbortRequest):
                break
        (resumed,) = await harness.received.wait_for(ResumeRequest, after=AbortRequest(RequestId("r")))
        assert isinstance(resumed, ResumeRequest)
        assert (resumed.generated_token_ids, resumed.holder) == ((11,), "")
        harness.emit(1, 12, 13, end=True)
        assert (await read(stream))[0] == [12, 13]


async def test_a_first_token_lost_with_its_worker_is_asked_for_though_another_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_request, "_RESEND_SOON_S", 60.0)  # at once, and not as it is silent
    monkeypatch.setattr(open_request, "_RESEND_AFTER_S", 60.0)
    async with cluster(tmp_path) as harness:
        harness.submit(name="other")
        harness.submit()
        prefill = LinkManager(Identity(Role.PREFILL_WORKER, "prefill-0", SECRET), Codec(RouterInbound), Recorder())
        prefill.dial(harness.gateway_address)
        await holds(lambda: bool(prefill.peers()))
        harness.emit(1, 12)
        harness.emit(0, 21, end=True, name="other")
        await holds(lambda: RequestId("other") not in harness.backend._open)
        await prefill.close()
        (resumed,) = await harness.received.wait_for(ResumeRequest)
        assert isinstance(resumed, ResumeRequest)
        assert (resumed.request.request_id, resumed.generated_token_ids) == ("r", ())


async def test_an_answer_that_pauses_while_others_are_served_is_not_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_backend, "_MAX_CHECK_PAUSE_S", 0.01)
    async with cluster(tmp_path, token_timeout_s=20.0) as harness:
        stream = harness.submit()
        harness.emit(0, 11)
        assert (await anext(stream)).token_ids == (11,)
        entry = harness.backend._open[RequestId("r")]
        other = harness.submit(name="other", max_tokens=100)
        entry.last_heard_s -= 30.0  # while another has the memory
        for index in range(10):
            await asyncio.sleep(0.01)
            harness.emit(index, 12, name="other")
            assert (await anext(other)).token_ids == (12,)
        harness.emit(1, 12)
        assert (await anext(stream)).token_ids == (12,)
        entry.last_heard_s -= 30.0
        harness.backend._served_s -= 30.0
        assert isinstance(await failure_of(stream), TimedOut)  # with nobody served it is not to come
    assert "request r, real_time, is given up" in caplog.text
    assert "after 2 tokens, the last from decode-0" in caplog.text


async def test_no_first_token_in_time(tmp_path: Path) -> None:
    async with cluster(tmp_path, first_token_timeout_s=0.2) as harness:
        assert isinstance(await failure_of(harness.submit()), TimedOut)
        await harness.received.wait_for(AbortRequest)


async def test_best_effort_may_be_silent_for_longer_than_chat_and_until_its_deadline(tmp_path: Path) -> None:
    async with cluster(tmp_path, first_token_timeout_s=0.1, token_timeout_s=0.1, best_effort_timeout_s=30.0) as harness:
        flex = harness.submit(name="flex", request_class=RequestClass.BEST_EFFORT)
        slo = Slo(deadline_s=60.0)
        line = harness.submit(name="line", request_class=RequestClass.BEST_EFFORT, slo=slo)
        assert isinstance(await failure_of(harness.submit()), TimedOut)
        harness.emit(0, 11, name="flex")
        assert (await anext(flex)).token_ids == (11,)
        # Only now, however late: before, the test's own pauses could have made it as long.
        harness.backend._config = replace(harness.backend._config, best_effort_timeout_s=0.2)
        assert isinstance(await failure_of(flex), TimedOut)
        harness.emit(0, 11, end=True, name="line")
        assert (await anext(line)).token_ids == (11,)


def test_what_the_default_policy_may_pause_is_not_given_up() -> None:
    """A chat that has lost its cache once waited for as long as the gateway's patience: its answer was cut."""
    assert 2 * AlignedSloConfig().return_s <= cluster_backend._PAUSED * GatewayConfig().token_timeout_s
