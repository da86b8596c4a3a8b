"""A process that is starved, or stopped for a while, is not a hung one; only a hung one is replaced."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.batch_jobs import NUM_LINES, check_answers, submit, wait_for
from tests.cluster.serving import EXACT, Serving, serving, token_prompts
from tests.cluster.streams import stream_all
from tests.support.busy_processes import busy_processes

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.promise, pytest.mark.alone, pytest.mark.timeout(300)]

ACTORS = ("Router", "KvPool", "PrefillWorker", "DecodeWorker", "Gateway", "Batch")
PROMPTS = token_prompts(6, max_len=100)
HANG_TIMEOUT = ("--set", "links.hang_timeout_s=5")
LOAD = 20


def processes(cluster: Serving) -> dict[str, list[int]]:
    """Return the actors' process ids; an actor's title has its class only between two calls."""
    found: dict[str, list[int]] = {}
    for kind in ACTORS:
        ends_s = time.monotonic() + 20.0
        while not (actors := cluster.actors(kind)):
            assert time.monotonic() < ends_s, f"no {kind}"
            time.sleep(0.05)
        found[kind] = [actor.pid for actor in actors]
    return found


@pytest.fixture(scope="module")
def watched_cluster(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Iterator[Serving]:
    """A cluster that soon takes a process for hung, on a machine whose memory Ray would take for full."""
    full = {"RAY_memory_usage_threshold": "0.001"}
    options = (str(random_model), *EXACT, *HANG_TIMEOUT, "--set", "topology=disaggregated")
    with serving(tmp_path_factory.mktemp("watched"), *options, environment=full) as served:
        served.wait_ready()
        yield served


@pytest.fixture
def watched(watched_cluster: Serving) -> Serving:
    """The cluster of this module, whole and idle."""
    watched_cluster.wait_ready()
    watched_cluster.wait_idle()
    return watched_cluster


def test_memory_that_other_programs_use_ends_no_actor(watched: Serving) -> None:
    """Ray would count the whole machine's, and kill every actor above its share."""
    before = processes(watched)
    time.sleep(3.0)
    assert watched.complete()[0] == 200
    assert processes(watched) == before


def test_starved_processes_go_on(watched: Serving) -> None:
    before = processes(watched)
    with busy_processes(LOAD):
        ends_s = time.monotonic() + 15.0
        while time.monotonic() < ends_s:
            asyncio.run(stream_all(watched.url, PROMPTS, 50))
    assert processes(watched) == before


def test_a_cluster_that_is_stopped_as_a_whole_goes_on(watched: Serving) -> None:
    before = processes(watched)
    everything = [psutil.Process(watched.pid), *psutil.Process(watched.pid).children(recursive=True)]
    for process in everything:
        process.suspend()
    time.sleep(10.0)
    for process in reversed(everything):
        process.resume()
    watched.wait_ready()
    assert watched.complete()[0] == 200
    assert processes(watched) == before


@pytest.mark.parametrize("kind", ["Gateway", "Router"])
def test_an_actor_that_is_stopped_for_less_than_the_time_out_goes_on_and_for_longer_is_replaced(
    watched: Serving, kind: str
) -> None:
    before = processes(watched)
    stopped = watched.actor(kind)
    stopped.suspend()
    time.sleep(2.0)
    stopped.resume()
    watched.wait_ready()
    time.sleep(4.0)
    assert processes(watched) == before
    stopped.suspend()
    assert psutil.wait_procs([stopped], timeout=60.0)[1] == []
    watched.wait_ready()
    assert watched.complete()[0] == 200
    assert processes(watched)[kind] != before[kind]


def test_a_driver_of_batches_that_is_stopped_for_ever_is_replaced(watched: Serving) -> None:
    batch = submit(watched.url, NUM_LINES)
    wait_for(watched, batch, 20)
    watched.actor("Batch").suspend()
    check_answers(watched, batch)
