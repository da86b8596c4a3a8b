"""A node drains, more and fewer workers are asked for, and no stream notices; on two Ray nodes of this host."""

import asyncio
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.ray_nodes import RayNodes
from tests.cluster.serving import EXACT
from tests.cluster.streams import Stream, make_client, stream_all, stream_one
from tests.support.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

PROMPTS = [(5, 6, 7 + number) for number in range(3)]
NUM_TOKENS = 600
OPTIONS = (
    *("--set", "topology=disaggregated", "--set", "engine.threads_per_worker=1"),
    *("--set", "engine.calibration_s=0.2", "--set", "model.served_model_name=model"),
    *("--set", "gateway.host=node"),  # the nodes have different addresses of this host
)


@pytest.fixture(scope="module")
def nodes(random_model: Path) -> Iterator[RayNodes]:
    folder = Path(tempfile.mkdtemp(prefix="as"))  # short: sockets are in it
    made = RayNodes(folder)
    try:
        recorded = ("--record", str(folder / "recorded"))
        made.start_and_up(str(random_model), *EXACT, *OPTIONS, *recorded, "--port", str(free_port()))
        yield made
    finally:
        made.end()
        shutil.rmtree(folder, ignore_errors=True)


async def streams_through(url: str) -> list[Stream]:
    async with make_client(url) as client:
        streams = [Stream() for _ in PROMPTS]
        await asyncio.gather(
            *(stream_one(client, one, NUM_TOKENS, into) for one, into in zip(PROMPTS, streams, strict=True))
        )
        return streams


def check(streams: list[Stream], right: list[Stream]) -> None:
    assert [(one.error, one.is_done) for one in streams] == [(None, True)] * len(streams)
    assert [one.text for one in streams] == [one.text for one in right]
    print("longest pause", max(one.longest_gap_s for one in streams))


async def order(nodes: RayNodes, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = await asyncio.to_thread(nodes.command, *arguments, timeout_s=120.0)
    print(f"$ alignedserve {' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return done


def workers(status: dict[str, Any]) -> dict[str, list[str]]:
    """Return the workers of each node."""
    return {
        node["name"]: [name for name in node["actors"] if name.startswith(("prefill", "decode"))]
        for node in status["nodes"]
    }


def states(status: dict[str, Any]) -> list[Any]:
    return [node["drain"] for node in status["nodes"]]


def num_decode_workers(status: dict[str, Any]) -> int:
    """Return how many the router has."""
    return int((status["load"] or {}).get("num_decode_workers", 0))


def is_whole_again(status: dict[str, Any]) -> bool:
    """Return whether both nodes have workers, three decode, and gateways."""
    is_used = states(status) == ["", ""] and all(node["urls"] for node in status["nodes"])
    return is_used and len(workers(status)["node-1"]) >= 2 and num_decode_workers(status) == 3


async def wait_for(nodes: RayNodes, num_decode: int) -> None:
    """Wait until the router has so many decode workers."""
    await asyncio.to_thread(nodes.wait_for_status, lambda found: num_decode_workers(found) == num_decode)


async def test_streams_run_through_drains_and_scales(nodes: RayNodes) -> None:
    first, second = nodes.urls()
    right = await stream_all(first, PROMPTS, NUM_TOKENS)
    refused = await order(nodes, "drain", "node-0")
    assert refused.returncode == 1
    assert "node-0 is the head" in refused.stderr
    assert "there is no node nowhere" in (await order(nodes, "drain", "nowhere")).stderr

    running = [asyncio.create_task(streams_through(url)) for url in (first, first, second)]
    await asyncio.sleep(0.5)
    assert "starts on node-" in (await order(nodes, "scale", "decode=3")).stdout
    await wait_for(nodes, 3)
    running.append(asyncio.create_task(streams_through(second)))
    await asyncio.sleep(0.5)
    # Its own streams may finish; those of the other gateway that it decodes are moved.
    ready = f"{second}/ready"  # asked from the beginning: without streams a drain is over at once
    draining = asyncio.to_thread(nodes.wait, lambda: "draining" in httpx.get(ready).text, nodes.driver_log)
    said = asyncio.create_task(draining)
    assert (await order(nodes, "drain", "node-1", "--within", "1", "--no-wait")).returncode == 0
    await said
    for each in await asyncio.gather(*running[:2]):
        check(each, right)
    await asyncio.gather(*running[2:])
    drained = await asyncio.to_thread(nodes.wait_for_status, lambda found: states(found) == ["", "drained"])
    assert workers(drained)["node-1"] == []
    check(await streams_through(first), right)


async def test_a_drained_node_comes_back_and_fewer_workers_serve(nodes: RayNodes) -> None:
    first = nodes.urls()[0]
    right = await stream_all(first, PROMPTS, NUM_TOKENS)
    assert (await order(nodes, "drain", "node-1", "--undo")).returncode == 0
    whole = await asyncio.to_thread(nodes.wait_for_status, is_whole_again)
    assert sum(name.startswith("decode") for found in workers(whole).values() for name in found) == 3
    running = [asyncio.create_task(streams_through(first)) for _ in range(2)]
    await asyncio.sleep(0.5)
    assert "ends when its requests have" in (await order(nodes, "scale", "decode=2")).stdout
    refused = await order(nodes, "scale", "decode=1")
    assert refused.returncode == 1
    assert "keep one decode worker each" in refused.stderr
    for each in await asyncio.gather(*running):
        check(each, right)
    await wait_for(nodes, 2)
    check(await streams_through(first), right)
    assert (await order(nodes, "stop")).returncode == 0
    nodes.wait(lambda: not nodes.leftovers(), nodes.leftovers, 60.0)


def test_every_decision_of_every_node_is_made_again(nodes: RayNodes) -> None:
    done = nodes.command("replay", str(nodes.folder / "recorded"), "--no-simulate", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rooms = json.loads(done.stdout)["rooms"]
    assert [(one["room"], one["difference"]) for one in rooms if one["difference"] is not None] == []
    parts = {one["file"].rpartition("/")[0]: one["is_whole"] for one in rooms if "node" in one}
    assert parts == {"node-1.1": True, "node-1.3": True}  # drained, and used again
    of_others = {one["room"] for one in rooms if "node" in one}
    assert {"pool-1", "prefill-1", "decode-1"} <= of_others
    assert {one["room"] for one in rooms if "node" not in one} >= {"router", "pool-0", "prefill-0", "decode-0"}
    assert sum(one["num_equal"] for one in rooms) > 10_000
