"""A driver that fails, one that hangs, a worker that does not start, and a head that is lost for good.

On two Ray nodes of this host, whose state is in the memory of Ray's head alone.
"""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from alignedserve.runtime.model.named_models import pocket_folder
from tests.cluster.batch_jobs import check_end, submit
from tests.cluster.ray_nodes import RayNodes
from tests.cluster.serving import FLOAT32
from tests.cluster.streams import Stream, all_started, check_whole, make_client, stream_all, stream_one, streams_through
from tests.support.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

PROMPTS = [(5, 6, 7 + number) for number in range(3)]
NUM_TOKENS = 600
ORPHANED_S, HEAD_LOST_S = 16.0, 26  # for which processes, and Ray's nodes, wait for a driver and a head; 50 and 60
OPTIONS = (
    *("--nodes", "2", "--set", "engine.threads_per_worker=1"),
    *("--set", "engine.calibration_s=0.2", "--set", "model.served_model_name=model"),
    *("--set", "gateway.host=node"),  # the nodes have different addresses of this host
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="as"))  # short: sockets are in it
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    """A model with weights of its own, to be damaged."""
    return Path(shutil.copytree(pocket_folder(), folder / "model"))


@pytest.fixture(scope="module")
def up_options(model: Path) -> tuple[str, ...]:
    return (str(model), *FLOAT32, *OPTIONS, "--port", str(free_port()))


@pytest.fixture(scope="module")
def nodes(folder: Path, up_options: tuple[str, ...]) -> Iterator[RayNodes]:
    made = RayNodes(folder)
    made.environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(HEAD_LOST_S)
    try:
        made.start(0)
        made.start(1)
        made.up(*up_options, "--record", str(folder / "recorded"))
        yield made
    finally:
        made.end()


async def until(nodes: RayNodes, holds: Any, timeout_s: float = 180.0) -> float:
    return await asyncio.to_thread(nodes.wait, holds, lambda: (nodes.status(), nodes.driver_log()[-4000:]), timeout_s)


def start_failing(nodes: RayNodes, asked: Path, patience_s: float, options: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start a driver without a supervisor (see failing_driver.py), and wait until the cluster is ready."""
    log = nodes.folder / f"{asked.name}.log"
    with log.open("wb") as into:
        command = [sys.executable, "-m", "tests.cluster.failing_driver", str(asked), str(patience_s), *options]
        driver = subprocess.Popen(command, env=nodes.environment, stdout=into, stderr=into)
    nodes.wait(lambda: "ready in" in log.read_text(errors="replace"), lambda: log.read_text(errors="replace"), 180.0)
    return driver


def replace_content(path: Path, content: bytes) -> None:
    """Put another file in its place; a process may have the former one mapped."""
    made = path.with_suffix(".new")
    made.write_bytes(content)
    made.replace(path)


def failing(nodes: RayNodes) -> dict[str, Any]:
    """Return what does not serve, of all nodes."""
    found: dict[str, Any] = {}
    for node in nodes.status().get("nodes", ()):
        found |= node["failing"]
    return found


async def test_an_error_of_the_driver_s_own_leaves_the_cluster_to_the_next_one(
    nodes: RayNodes, up_options: tuple[str, ...]
) -> None:
    second = nodes.urls()[1]
    right = await stream_all(second, PROMPTS, NUM_TOKENS)
    actors, command = set(nodes.actors()), nodes.driver().cmdline()
    assert command[1:3] == ["-m", "alignedserve"]
    for process in (nodes.supervisor(), nodes.driver()):
        process.kill()
    asked = nodes.folder / "fail"
    driver = await asyncio.to_thread(start_failing, nodes, asked, 60.0, command[3:])
    streams = [Stream() for _ in PROMPTS]
    running = asyncio.create_task(streams_through(second, PROMPTS, streams, NUM_TOKENS))
    await all_started(streams)
    asked.touch()
    assert await asyncio.to_thread(driver.wait, 60.0) != 0
    (said,) = nodes.run_dir.glob("*-0/logs/driver.log")
    assert "leaves the cluster to the next one" in said.read_text()
    await running
    check_whole(streams, right)
    assert set(nodes.actors()) == actors
    record = ("--record", str(nodes.folder / "recorded"))
    print("up took", await asyncio.to_thread(nodes.up, *up_options, *record))
    assert set(nodes.actors()) == actors
    check_whole(await stream_all(second, PROMPTS, NUM_TOKENS), right)


async def test_a_worker_that_does_not_start_is_shown_and_starts_when_it_can(nodes: RayNodes, model: Path) -> None:
    first = nodes.urls()[0]
    right = await stream_all(first, PROMPTS, NUM_TOKENS)
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    replace_content(weights, bytes(len(whole)))
    of_node = {process.pid for process in nodes.processes(1)}
    (ended,) = [pid for pid, title in nodes.actors().items() if pid in of_node and "Worker" in title]
    psutil.Process(ended).kill()
    await until(nodes, lambda: "failed start" in failing(nodes).get("worker-1", {}).get("problem", ""))
    found = failing(nodes)
    print(nodes.command("status").stdout)
    assert list(found) == ["worker-1"]
    assert weights.name in found["worker-1"]["problem"]
    assert any(weights.name in line for line in found["worker-1"]["log"])
    assert nodes.command("status").returncode == 1
    check_whole(await stream_all(first, PROMPTS, NUM_TOKENS), right)  # the others serve
    await until(nodes, lambda: "2 failed starts" in failing(nodes).get("worker-1", {}).get("problem", ""))
    replace_content(weights, whole)
    await until(nodes, lambda: nodes.status()["load"]["num_decode_workers"] == 2 and not failing(nodes))
    status = nodes.command("status")
    assert (status.returncode, "2 elastic workers" in status.stdout) == (0, True)
    assert "prefill=2: the workers of this cluster do both phases" in nodes.command("scale", "prefill=2").stderr
    check_whole(await stream_all(first, PROMPTS, NUM_TOKENS), right)


def test_stop_ends_a_driver_that_hangs_and_its_supervisor(nodes: RayNodes, up_options: tuple[str, ...]) -> None:
    supervisor, driver = nodes.supervisor(), nodes.driver()
    driver.send_signal(signal.SIGSTOP)
    done = nodes.command("stop")
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    assert len((done.stdout + done.stderr).strip().splitlines()) == 1
    assert not supervisor.is_running()
    assert not driver.is_running()
    nodes.wait(lambda: not nodes.leftovers(), nodes.leftovers, 60.0)


def test_what_three_drivers_recorded_is_decided_again(nodes: RayNodes, up_options: tuple[str, ...]) -> None:
    """The processes of both nodes, which outlived their drivers; the last one hung, so an end is missing."""
    recorded = nodes.folder / "recorded"
    done = nodes.command("replay", str(recorded), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    rooms = {(one["room"], one.get("node")): one for one in found["rooms"]}
    assert {("router", None), ("worker-0", None), ("worker-1", "node-1")} <= rooms.keys()
    assert all(one["difference"] is None for one in rooms.values())
    assert rooms["worker-1", "node-1"]["num_equal"] > 20
    assert rooms["worker-1", "node-1"]["is_whole"] is False
    assert found["simulation"]["num_requests"] > 10
    assert "is not empty" in nodes.command("up", *up_options, "--record", str(recorded)).stderr


async def test_a_head_that_is_lost_for_good_takes_the_cluster_with_it_and_a_new_one_serves(
    nodes: RayNodes, up_options: tuple[str, ...]
) -> None:
    """Streams of the other node's gateway end: exact where their worker is there and they have time, else said so."""
    command = ["serve", *up_options]
    driver = await asyncio.to_thread(start_failing, nodes, nodes.folder / "lost", ORPHANED_S, command)
    second = nodes.urls()[1]
    right = await stream_all(second, PROMPTS, 3 * NUM_TOKENS)
    batch = submit(second, 60, num_prompts=60, max_tokens=40)
    streams = [[Stream() for _ in PROMPTS] for _ in range(3)]
    running = [asyncio.create_task(streams_through(second, PROMPTS, each, 3 * NUM_TOKENS)) for each in streams]
    await all_started([one for each in streams for one in each])
    driver.kill()
    driver.wait()
    nodes.kill(0)
    lost_s = time.monotonic()
    late = Stream()
    await asyncio.sleep(1.0)  # until the gateway has seen it
    async with make_client(second) as client:
        await stream_one(client, PROMPTS[0], NUM_TOKENS, late)
    assert (late.status, "router is not connected" in str(late.error)) == (503, True), late
    await asyncio.gather(*running)
    print("streams have ended after", time.monotonic() - lost_s)
    for one, whole in ((one, whole) for each in streams for one, whole in zip(each, right, strict=True)):
        print(one.num_events, one.is_done, one.error)
        assert whole.text.startswith(one.text)
        # Not whole: its gateway said that it is shutting down, or was killed before with Ray's node.
        assert one.text == whole.text if one.is_done else one.error is not None
    left_s = await asyncio.to_thread(nodes.wait, lambda: not nodes.leftovers(), nodes.leftovers, 120.0)
    print("nothing is left after", left_s)
    nodes.kill(1)
    for index in range(2):
        await asyncio.to_thread(nodes.start, index)
    print("up took", await asyncio.to_thread(nodes.up, *up_options))
    check_whole(await stream_all(second, PROMPTS, 3 * NUM_TOKENS), right)
    check_end(nodes, batch)
