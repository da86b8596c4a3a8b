import asyncio
import itertools
import random
from typing import Any

import pytest

from alignedserve.client.openai_client import (
    ClientFailureKind,
    CompletionApi,
    CompletionCall,
    CompletionOutcome,
    OpenAiClient,
)
from alignedserve.core.errors import PeerError, PeerLost
from alignedserve.core.request import Slo
from lab.loadgen.load_generator import LoadGenerator, LoadRun
from lab.loadgen.load_plan import LoadPlan, LoadRequest, TrafficClass, plan_synthetic
from lab.loadgen.prompts import CallMaker, exact_prompt
from lab.workload.distributions import LengthLimits
from tests.support.servers.fake_server import MODEL, FakeServer, Script

pytestmark = pytest.mark.slow

CALL = CompletionCall(CompletionApi.CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]})


async def _complete(script: Script, call: CompletionCall = CALL, timeout_s: float = 30.0) -> CompletionOutcome:
    async with (
        FakeServer(respond=lambda body: script) as server,
        OpenAiClient(url=server.url, timeout_s=timeout_s) as client,
    ):
        return await client.complete(call, CompletionOutcome())


async def test_whole_answer() -> None:
    outcome = await _complete(Script(first_delay_s=0.05, gap_s=0.02))
    assert outcome.failure is None
    assert (outcome.text, outcome.finish_reason) == ("Hello there.", "stop")
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (7, 3)
    assert outcome.token_times_s[0] - outcome.sent_s >= 0.05
    assert outcome.token_times_s[2] - outcome.sent_s >= 0.09


async def test_completions_endpoint() -> None:
    outcome = await _complete(Script(), CompletionCall(CompletionApi.COMPLETIONS, {"model": MODEL, "prompt": "hi"}))
    assert outcome.text == "Hello there."


async def test_server_without_usage_counts_chunks() -> None:
    outcome = await _complete(Script(has_usage=False))
    assert (outcome.num_output_tokens, outcome.num_tokens) == (None, 3)


@pytest.mark.parametrize(
    ("script", "kind", "label"),
    [
        (Script(status=503), ClientFailureKind.HTTP, "http 503"),
        (Script(error_after=1), ClientFailureKind.ERROR_EVENT, "error event"),
        (Script(cut_after=1), ClientFailureKind.DISCONNECTED, "disconnected"),
        (Script(cut_after=0), ClientFailureKind.DISCONNECTED, "disconnected"),
        (Script(ends_early_after=2), ClientFailureKind.DISCONNECTED, "disconnected"),
    ],
)
async def test_failures_have_a_kind(script: Script, kind: ClientFailureKind, label: str) -> None:
    outcome = await _complete(script)
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.label) == (kind, label)


async def test_an_answer_that_does_not_come_in_time_is_a_failure() -> None:
    outcome = await _complete(Script(first_delay_s=30.0), timeout_s=0.3)
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.label) == (ClientFailureKind.TIMEOUT, "timeout")


async def test_error_event_mid_stream_keeps_text_and_message() -> None:
    outcome = await _complete(Script(error_after=1))
    assert outcome.text == "Hello"
    assert outcome.failure is not None
    assert outcome.failure.message == "scripted failure"


async def test_nothing_listens() -> None:
    async with FakeServer() as server:
        url = server.url
    async with OpenAiClient(url=url) as client:
        outcome = await client.complete(CALL, CompletionOutcome())
        assert outcome.failure is not None
        assert outcome.failure.kind is ClientFailureKind.CONNECT
        with pytest.raises(PeerLost, match="nothing answers at"):
            await client.model_name()


async def test_plain_pages() -> None:
    async with FakeServer() as server, OpenAiClient(url=server.url + "/v1/") as client:
        assert await client.model_name() == MODEL
        with pytest.raises(PeerError, match="404"):
            await client.get("/nowhere")


# --- the generator ----------------------------------------------------------------------------------------------------


async def _run(server: FakeServer, plan: LoadPlan, *, cuts_off: bool = False) -> LoadRun:
    maker = CallMaker(model=MODEL, endpoint=CompletionApi.CHAT, seed=0)
    classes = {traffic.name: traffic for traffic in plan.classes}

    async def send(request: LoadRequest, outcome: CompletionOutcome) -> None:
        await client.complete(maker.call(request, classes[request.class_name]), outcome)

    async with OpenAiClient(url=server.url, timeout_s=30.0) as client:
        return await LoadGenerator(plan=plan, send=send, cuts_off=cuts_off).run()


def _evenly(count: int, gap_s: float) -> LoadPlan:
    requests = tuple(LoadRequest(index, "a", index * gap_s, 5, 3) for index in range(count))
    return LoadPlan((TrafficClass("a"),), requests)


async def test_open_loop_is_not_delayed_by_slow_answers() -> None:
    all_sent = asyncio.Event()

    def respond(body: dict[str, Any]) -> Script:
        if len(server.requests) == 10:
            all_sent.set()
        return Script(held_until=all_sent)  # no answer begins before the last request is there

    async with FakeServer(respond=respond) as server:
        run = await _run(server, _evenly(10, 0.02))
    assert len(server.requests) == 10
    assert all(sent.outcome.failure is None for sent in run.sent)
    assert run.duration_s >= 0.18


async def test_one_failure_does_not_touch_the_others() -> None:
    plan = _evenly(4, 0.01)
    second = CallMaker(model=MODEL, endpoint=CompletionApi.CHAT, seed=0).call(plan.open_requests[1], plan.classes[0])

    def respond(body: dict[str, Any]) -> Script:  # each comes by a connection of its own, in whatever order
        return Script(cut_after=1) if body["messages"] == second.body["messages"] else Script()

    async with FakeServer(respond=respond) as server:
        run = await _run(server, plan)
    assert [sent.outcome.failure is None for sent in run.sent] == [True, False, True, True]


async def test_what_is_in_the_air_at_the_end_can_be_given_up() -> None:
    def plan() -> LoadPlan:
        (loop,) = plan_synthetic(
            "a: outstanding=3, prompt=4, output=2", seed=1, duration_s=1.0, num_requests=None, limits=LengthLimits()
        ).closed_loops
        return LoadPlan((loop.traffic,), (), (loop,), 1.0)

    async def run(release_s: float | None, *, cuts_off: bool) -> LoadRun:
        """Run a load: three are answered at once, three when the plan's time is over, or never."""
        release = asyncio.Event()
        if release_s is not None:
            asyncio.get_running_loop().call_later(release_s, release.set)
        number = itertools.count()
        respond = lambda body: Script(held_until=release if next(number) >= 3 else None)  # noqa: E731
        async with FakeServer(respond=respond) as server:
            return await _run(server, plan(), cuts_off=cuts_off)

    waited, cut = await asyncio.gather(run(1.2, cuts_off=False), run(None, cuts_off=True))
    assert [sent.outcome.finish_reason for sent in waited.sent] == ["stop"] * 6
    assert [sent.outcome.finish_reason for sent in cut.sent] == ["stop"] * 3


async def test_closed_loop_keeps_its_number_in_the_air() -> None:
    num_open: list[int] = []

    def respond(body: dict[str, Any]) -> Script:
        num_open.append(server.num_open + 1)
        return Script(gap_s=0.005)

    specification = "outstanding=3,prompt=5,output=3"
    plan = plan_synthetic(specification, seed=0, num_requests=12, duration_s=None, limits=LengthLimits())
    async with FakeServer(respond=respond) as server:
        run = await _run(server, plan)
    assert len(run.sent) == 12
    assert max(num_open) == 3


async def test_closed_loop_ends_with_the_open_one() -> None:
    specification = "rt: rate=50,prompt=5,output=3; be: outstanding=2,prompt=5,output=3"
    plan = plan_synthetic(specification, seed=0, num_requests=10, duration_s=None, limits=LengthLimits())
    async with FakeServer(respond=lambda body: Script(gap_s=0.005)) as server:
        run = await _run(server, plan)
    names = [sent.request.class_name for sent in run.sent]
    assert names.count("rt") == 10
    assert names.count("be") >= 2


async def test_cancelled_answer_is_kept_as_it_stood() -> None:
    async with FakeServer(respond=lambda body: Script(gap_s=5.0)) as server, OpenAiClient(url=server.url) as client:
        outcome, has_begun = CompletionOutcome(), asyncio.Event()
        running = asyncio.create_task(client.complete(CALL, outcome, lambda text: has_begun.set()))
        await has_begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert outcome.text == "Hello"


# --- calls ------------------------------------------------------------------------------------------------------------


def test_call_carries_lengths_objectives_and_tier() -> None:
    maker = CallMaker(model="m", endpoint=CompletionApi.COMPLETIONS, seed=0, ignore_eos=True)
    call = maker.call(LoadRequest(0, "be", 0.0, 6, 9), TrafficClass("be", Slo(0.25, 0.1), tier="flex"))
    assert (call.body["max_tokens"], call.body["ignore_eos"], call.body["service_tier"]) == (9, True, "flex")
    assert len(call.body["prompt"].split()) == 6
    assert call.headers == {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "100"}


def test_free_output_sends_no_limit() -> None:
    maker = CallMaker(model="m", endpoint=CompletionApi.CHAT, seed=0, limits_output=False)
    body = maker.call(LoadRequest(0, "a", 0.0, 6, 9), TrafficClass("a")).body
    assert body.keys() == {"model", "temperature", "messages"}


def _prompt(maker: CallMaker, index: int) -> str:
    prompt: str = maker.call(LoadRequest(index, "a", 0.0, 50, 1), TrafficClass("a")).body["prompt"]
    return prompt


def test_prompts_differ_from_the_first_word_and_repeat_with_the_seed() -> None:
    maker = CallMaker(model="m", endpoint=CompletionApi.COMPLETIONS, seed=0)
    prompts = [_prompt(maker, index) for index in (0, 1, 0)]
    assert prompts[0] == prompts[2] != prompts[1]


def test_prompts_of_another_run_are_new() -> None:
    """Otherwise a prefix cache knows them from the run before, and its first tokens come too soon."""
    first, second = (CallMaker(model="m", endpoint=CompletionApi.COMPLETIONS) for _ in range(2))
    assert _prompt(first, 0).split()[:8] != _prompt(second, 0).split()[:8]
    assert _prompt(first, 0) == _prompt(first, 0)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 300])
def test_prompts_of_closed_loops_are_no_longer_than_planned(num_tokens: int) -> None:
    """A planned length may be all that the context of a model has room for beside the answer."""

    def count_tokens(text: str) -> int:
        return sum(2 if len(word) > 6 else 1 for word in text.split())

    maker = CallMaker(model="m", endpoint=CompletionApi.COMPLETIONS, seed=3)
    maker.calibrate(count_tokens)
    for index in range(20):
        prompt = maker.call(LoadRequest(index, "a", 0.0, num_tokens, 1), TrafficClass("a")).body["prompt"]
        assert count_tokens(prompt) == num_tokens


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_exact_prompts_for_a_tokenizer_that_splits_words(num_tokens: int) -> None:
    def count_tokens(text: str) -> int:
        return sum(2 if len(word) > 6 else 1 for word in text.split())

    assert count_tokens(exact_prompt(num_tokens, random.Random(1), count_tokens)) == num_tokens
