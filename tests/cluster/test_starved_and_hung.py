"""A process that is starved, or stopped for a while, is not a hung one; only a hung one is replaced."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.serving import EXACT, Serving, serving, token_prompts
from tests.cluster.streams import stream_all

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]

ACTORS = ("Router", "KvPool", "PrefillWorker", "DecodeWorker", "Gateway", "Batch")
PROMPTS = token_prompts(6, max_len=100)
HANG_TIMEOUT = ("--set", "links.hang_timeout_s=5")
LOAD = 20


def processes(cluster: Serving) -> dict[str, list[int]]:
    """The actors' process ids; an actor's title has its class only between two calls."""
    found: dict[str, list[int]] = {}
    for kind in ACTORS:
        ends_s = time.monotonic() + 20.0
        while not (actors := cluster.actors(kind)):
            assert time.monotonic() < ends_s, f"no {kind}"
            time.sleep(0.05)
        found[kind] = [actor.pid for actor in actors]
    return found


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_starved_processes_go_on(tmp_path: Path, random_model: Path) -> None:
    with serving(tmp_path / "run", str(random_model), *EXACT, *HANG_TIMEOUT) as cluster:
        cluster.wait_ready()
        before = processes(cluster)
        with busy_processes(LOAD):
            ends_s = time.monotonic() + 15.0
            while time.monotonic() < ends_s:
                asyncio.run(stream_all(cluster.url, PROMPTS, 50))
        assert processes(cluster) == before


def test_memory_that_other_programs_use_ends_no_actor(tmp_path: Path, random_model: Path) -> None:
    """Ray would count the whole machine's, and kill every actor above this share."""
    full = {"RAY_memory_usage_threshold": "0.001"}
    with serving(tmp_path / "run", str(random_model), *EXACT, environment=full) as cluster:
        cluster.wait_ready()
        before = processes(cluster)
        time.sleep(3.0)
        assert cluster.complete()[0] == 200
        assert processes(cluster) == before


def test_a_cluster_that_is_stopped_as_a_whole_goes_on(tmp_path: Path, random_model: Path) -> None:
    with serving(tmp_path / "run", str(random_model), *EXACT, *HANG_TIMEOUT) as cluster:
        cluster.wait_ready()
        before = processes(cluster)
        everything = [psutil.Process(cluster.pid), *psutil.Process(cluster.pid).children(recursive=True)]
        for process in everything:
            process.suspend()
        time.sleep(10.0)
        for process in reversed(everything):
            process.resume()
        cluster.wait_ready()
        assert cluster.complete()[0] == 200
        assert processes(cluster) == before


@pytest.mark.parametrize("kind", ["Gateway", "Router"])
def test_an_actor_that_is_stopped_for_less_than_the_time_out_goes_on_and_for_longer_is_replaced(
    tmp_path: Path, random_model: Path, kind: str
) -> None:
    with serving(tmp_path / "run", str(random_model), *EXACT, *HANG_TIMEOUT) as cluster:
        cluster.wait_ready()
        before = processes(cluster)
        stopped = cluster.actor(kind)
        stopped.suspend()
        time.sleep(2.0)
        stopped.resume()
        cluster.wait_ready()
        time.sleep(4.0)
        assert processes(cluster) == before
        stopped.suspend()
        assert psutil.wait_procs([stopped], timeout=60.0)[1] == []
        cluster.wait_ready()
        assert cluster.complete()[0] == 200
        assert processes(cluster)[kind] != before[kind]
