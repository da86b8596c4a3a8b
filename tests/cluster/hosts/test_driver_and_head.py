"""The loss of the driver, and of Ray's head with all that runs on its node, while streams run on the other node."""

import asyncio
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.batch_jobs import check_end, submit
from tests.cluster.ray_nodes import RayNodes
from tests.cluster.serving import EXACT
from tests.cluster.streams import Stream, all_started, check_whole, stream_all, streams_through
from tests.support.ports import free_port
from tests.support.servers.valkey import SERVER

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

PROMPTS = [(5, 6, 7 + number) for number in range(3)]
NUM_TOKENS = 600
OPTIONS = (
    *("--set", "topology=colocated", "--set", "engine.threads_per_worker=1"),
    *("--set", "engine.calibration_s=0.2", "--set", "model.served_model_name=model"),
    *("--set", "gateway.host=node"),  # the nodes have different addresses of this host
)


@pytest.fixture(scope="module")
def redis_url(folder: Path) -> Iterator[str]:
    """A Redis with a password that outlives the head."""
    password, port = secrets.token_hex(8), free_port()
    settings = f"bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ''\ndir {folder}\n"
    server = subprocess.Popen([SERVER, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert server.stdin is not None
    server.stdin.write(settings)
    server.stdin.close()
    yield f"redis://:{password}@127.0.0.1:{port}"
    server.terminate()
    server.wait()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="as"))  # short: sockets are in it
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def up_options(random_model: Path) -> tuple[str, ...]:
    return (str(random_model), *EXACT, *OPTIONS, "--port", str(free_port()))


@pytest.fixture(scope="module")
def nodes(folder: Path, redis_url: str, up_options: tuple[str, ...]) -> Iterator[RayNodes]:
    made = RayNodes(folder, redis_url)
    try:
        made.start_and_up(*up_options)
        yield made
    finally:
        made.end()


async def test_a_driver_that_is_killed_is_replaced_and_no_stream_notices(nodes: RayNodes) -> None:
    first, second = nodes.urls()
    right = await stream_all(second, PROMPTS, NUM_TOKENS)
    actors = set(nodes.actors())
    streams = [[Stream() for _ in PROMPTS] for _ in (first, second)]
    running = [
        asyncio.create_task(streams_through(url, PROMPTS, each, NUM_TOKENS))
        for url, each in zip((first, second), streams, strict=True)
    ]
    for each in streams:
        await all_started(each)
    killed = nodes.driver()
    killed.kill()
    await asyncio.gather(*running)
    for each in streams:
        check_whole(each, right)
    taken_s = await asyncio.to_thread(nodes.wait, lambda: "goes on, on 2 nodes" in nodes.driver_log(), nodes.driver_log)
    print("taken over after", taken_s)
    await asyncio.to_thread(nodes.wait_for_status, lambda found: found.get("is_ready") is True)
    assert nodes.driver().pid != killed.pid
    assert set(nodes.actors()) == actors


async def test_the_head_is_killed_with_all_that_runs_on_its_node_and_comes_back(
    nodes: RayNodes, up_options: tuple[str, ...]
) -> None:
    second = nodes.urls()[1]
    right = await stream_all(second, PROMPTS, NUM_TOKENS)
    batch = submit(second, 60, num_prompts=60, max_tokens=40)
    streams = [Stream() for _ in PROMPTS]
    running = asyncio.create_task(streams_through(second, PROMPTS, streams, NUM_TOKENS))
    await all_started(streams)
    supervisor, driver = nodes.supervisor(), nodes.driver()
    supervisor.kill()
    driver.kill()
    nodes.kill(0)
    began_s = time.monotonic()
    await asyncio.to_thread(nodes.start, 0)
    print("Ray's head is back after", time.monotonic() - began_s)
    print("up took", await asyncio.to_thread(nodes.up, "--nodes", "2", *up_options))
    await running
    check_whole(streams, right)
    assert "goes on, on 2 nodes" in nodes.driver_log()[-20000:]
    check_end(nodes, batch)


def test_stop_leaves_nothing_of_what_was_taken_over(nodes: RayNodes) -> None:
    done = nodes.command("stop")
    assert done.returncode == 0, done.stderr
    nodes.wait(lambda: not nodes.leftovers(), nodes.leftovers, 60.0)
    nodes.wait(lambda: not nodes.is_supervised(), nodes.driver_log, 20.0)
