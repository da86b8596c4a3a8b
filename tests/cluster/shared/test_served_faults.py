"""Processes of a served cluster die or stop while it streams: every answer goes on, unchanged, and nothing leaks."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.serving import EXACT, Serving, serving, token_prompts
from tests.cluster.streams import Stream, make_client, stream_all, stream_one
from tests.support.marks import slow

pytestmark = [pytest.mark.cluster, pytest.mark.promise, pytest.mark.timeout(400)]

PROMPTS = token_prompts(8)
MAX_TOKENS = 200
_TRIES = 3
SEPARATE_KINDS = ("DecodeWorker", "PrefillWorker", "KvPool", "Router")
SOON_S = 2.0  # of a loss, on an idle machine; of three losses on a busy one the quickest says what the program can do
NUM_LOSSES = 3
WRITTEN_S = 2.5  # a gateway writes usage every second
STOPPED_S = 8.0  # longer than links.peer_timeout_s: all peers have given it up when it wakes


@pytest.fixture(scope="module")
def undisturbed(shared_cluster: Serving) -> list[str]:
    return reference(shared_cluster)


@pytest.fixture(scope="module")
def larger_cluster(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Iterator[Serving]:
    counts = ("--set", "topology=disaggregated", "--set", "prefill.count=2", "--set", "decode.count=2")
    options = (str(random_model), *EXACT, *counts)
    with serving(tmp_path_factory.mktemp("larger"), *options) as served:
        served.wait_ready()
        yield served


def reference(cluster: Serving) -> list[str]:
    streams = asyncio.run(stream_all(cluster.url, PROMPTS, MAX_TOKENS))
    assert all(stream.is_done and stream.error is None for stream in streams), streams
    assert len({stream.text for stream in streams}) == len(PROMPTS)
    return [stream.text for stream in streams]


async def stream_through(cluster: Serving, hurt: Callable[[], object], *, is_router_hurt: bool) -> list[Stream]:
    """Stream everything; once the first answers flow, for a router all of them, do what hurts.

    Where this process was held up meanwhile, so that an answer has ended, all begin again.
    """
    async with make_client(cluster.url) as client:
        for _ in range(_TRIES):
            streams = [Stream() for _ in PROMPTS]
            pairs = zip(PROMPTS, streams, strict=True)
            tasks = [asyncio.create_task(stream_one(client, prompt, MAX_TOKENS, stream)) for prompt, stream in pairs]
            await asyncio.gather(*(stream.started.wait() for stream in (streams if is_router_hurt else streams[:3])))
            if not any(stream.is_done for stream in streams):
                await asyncio.to_thread(hurt)
                await asyncio.gather(*tasks)
                return streams
            await asyncio.gather(*tasks)
    raise AssertionError("too late to hurt")


def stop_and_continue(process: psutil.Process) -> None:
    process.suspend()
    try:
        time.sleep(STOPPED_S)
    finally:
        process.resume()


def assert_unharmed(cluster: Serving, streams: list[Stream], undisturbed: list[str]) -> None:
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert [stream.text for stream in streams] == undisturbed
    assert all(stream.is_done for stream in streams)
    assert_serves(cluster)


def assert_serves(cluster: Serving) -> None:
    cluster.wait_ready()
    cluster.wait_idle()
    assert cluster.complete()[0] == 200


@pytest.mark.parametrize("kind", ["ColocatedWorker", *slow("Router")])
async def test_a_killed_process_is_not_noticed_by_clients(cluster: Serving, undisturbed: list[str], kind: str) -> None:
    victim = cluster.actor(kind)
    streams = await stream_through(cluster, victim.kill, is_router_hurt=kind == "Router")
    assert_unharmed(cluster, streams, undisturbed)
    assert victim.pid not in [actor.pid for actor in cluster.actors(kind)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SEPARATE_KINDS)
async def test_nor_is_one_of_separate_workers(separate_cluster: Serving, undisturbed: list[str], kind: str) -> None:
    victim = separate_cluster.actor(kind)
    streams = await stream_through(separate_cluster, victim.kill, is_router_hurt=kind == "Router")
    assert_unharmed(separate_cluster, streams, undisturbed)
    assert separate_cluster.actor(kind).pid != victim.pid


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DecodeWorker", "PrefillWorker", "KvPool"])
async def test_a_lone_process_is_back_soon(separate_cluster: Serving, undisturbed: list[str], kind: str) -> None:
    await assert_back_soon(separate_cluster, undisturbed, kind)


async def assert_back_soon(cluster: Serving, undisturbed: list[str], kind: str) -> None:
    """A request that is sent right after the loss of the only such process waits for the next one, and not for long."""
    waits_s = []
    async with make_client(cluster.url) as client:
        for _ in range(NUM_LOSSES):
            victim = cluster.actor(kind)
            victim.kill()
            stream = await stream_one(client, PROMPTS[0], MAX_TOKENS, Stream())
            assert (stream.error, stream.text) == (None, undisturbed[0])
            waits_s.append(stream.longest_gap_s)  # before the first token, or between two of them
            await asyncio.to_thread(assert_serves, cluster)
            assert cluster.actor(kind).pid != victim.pid
    assert min(waits_s) < SOON_S, waits_s


@pytest.mark.parametrize("kinds", slow(("Router",), ("Router", "ColocatedWorker")))
async def test_requests_without_a_token_are_not_lost(
    cluster: Serving, undisturbed: list[str], kinds: tuple[str, ...]
) -> None:
    """Those that have just been sent, and those that come while there is no router."""
    streams = [Stream() for _ in PROMPTS]
    async with make_client(cluster.url) as client:

        def begin(first: int, last: int) -> list[asyncio.Task[Stream]]:
            pairs = list(zip(PROMPTS, streams, strict=True))[first:last]
            return [asyncio.create_task(stream_one(client, prompt, MAX_TOKENS, stream)) for prompt, stream in pairs]

        tasks = begin(0, 4)
        await asyncio.sleep(0)  # they are on their way
        for kind in kinds:
            cluster.actor(kind).kill()
        await asyncio.to_thread(cluster.wait_unready)
        tasks += begin(4, 8)
        await asyncio.gather(*tasks)
    assert_unharmed(cluster, streams, undisturbed)


async def test_a_killed_gateway_comes_back_on_its_port_and_frees_what_it_had(cluster: Serving) -> None:
    """What ended more than a second before is in the usage, nothing is there twice, and what broke off is not."""
    before = used(cluster)
    answers = [cluster.complete(max_tokens=9, n=2)[1]["usage"] for _ in range(3)]
    await asyncio.sleep(WRITTEN_S)
    victim = cluster.actor("Gateway")
    streams = await stream_through(cluster, victim.kill, is_router_hurt=False)
    assert all(stream.error is not None and not stream.is_done for stream in streams)
    cluster.wait_ready()
    cluster.wait_idle()
    after = used(cluster)
    assert after["num_model_requests"] - before["num_model_requests"] == len(answers)
    assert after["input_tokens"] - before["input_tokens"] == sum(one["prompt_tokens"] for one in answers)
    assert after["output_tokens"] - before["output_tokens"] == sum(one["completion_tokens"] for one in answers)
    assert after["compute_seconds"] > before["compute_seconds"]
    assert cluster.complete()[0] == 200


def used(cluster: Serving) -> Counter[str]:
    """Return what chat and completions have used since the cluster's state began."""
    status, text = cluster.get(f"/v1/usage?start_time={int(time.time()) - 7200}&group_by=class&bucket_width=1h")
    assert status == 200, text
    results = [result for bucket in json.loads(text)["data"] for result in bucket["results"]]
    names = ("num_model_requests", "input_tokens", "output_tokens", "compute_seconds")
    of_chat = [result for result in results if result["class"] != "batch"]
    return Counter({name: sum(result[name] for result in of_chat) for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ColocatedWorker", "Gateway"])
async def test_a_process_that_stops_and_wakes_does_no_harm(cluster: Serving, undisturbed: list[str], kind: str) -> None:
    victim = cluster.actor(kind)
    streams = await stream_through(cluster, lambda: stop_and_continue(victim), is_router_hurt=False)
    assert_unharmed(cluster, streams, undisturbed)
    assert cluster.actor(kind).pid == victim.pid


@pytest.mark.slow
@pytest.mark.parametrize("kind", SEPARATE_KINDS)
async def test_nor_does_one_of_separate_workers(separate_cluster: Serving, undisturbed: list[str], kind: str) -> None:
    victim = separate_cluster.actor(kind)
    streams = await stream_through(separate_cluster, lambda: stop_and_continue(victim), is_router_hurt=kind == "Router")
    assert_unharmed(separate_cluster, streams, undisturbed)
    assert separate_cluster.actor(kind).pid == victim.pid


@pytest.mark.slow
@pytest.mark.parametrize("kind", SEPARATE_KINDS)
async def test_of_several_workers_one_dies(larger_cluster: Serving, kind: str) -> None:
    undisturbed = await asyncio.to_thread(reference, larger_cluster)
    hurts = (lambda: larger_cluster.actor(kind).kill(), lambda: stop_and_continue(larger_cluster.actor(kind)))
    for hurt in hurts:
        streams = await stream_through(larger_cluster, hurt, is_router_hurt=kind == "Router")
        assert_unharmed(larger_cluster, streams, undisturbed)


@pytest.mark.slow
async def test_everything_but_the_gateway_dies_at_once(separate_cluster: Serving, undisturbed: list[str]) -> None:
    victims = [separate_cluster.actor(kind) for kind in SEPARATE_KINDS]

    def kill_all() -> None:
        for victim in victims:
            victim.kill()

    streams = await stream_through(separate_cluster, kill_all, is_router_hurt=True)
    assert_unharmed(separate_cluster, streams, undisturbed)
