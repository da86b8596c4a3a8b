"""Starting, stopping and killing `alignedserve serve`: exit codes, and nothing left behind."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.serving import Serving, serving
from tests.cluster.streams import Stream, make_client, stream_one

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

RANDOM = ("--set", "model.random_weights=true")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Iterator[Serving]:
    """One that serves until the last test ends it."""
    with serving(tmp_path_factory.mktemp("first"), str(random_model), *RANDOM) as cluster:
        cluster.wait_ready()
        yield cluster


def has_begun(cluster: Serving) -> bool:
    return any(cluster.run_dir.iterdir())


def has_ray(cluster: Serving) -> bool:
    cluster.note_processes()
    return any("raylet" in name for name in cluster.process_names())


def has_actors(cluster: Serving) -> bool:
    return bool(cluster.actors("Router"))


def wait_until(cluster: Serving, holds: Callable[[Serving], bool]) -> None:
    while not holds(cluster):
        assert cluster.is_running(), cluster.finish()
        time.sleep(0.05)


def test_ray_starts_nothing_that_one_host_has_no_use_for(first: Serving) -> None:
    """As `ray.init` would: the autoscaler's monitor, the dashboard's server, the reader of logs."""
    commands = [" ".join(process.cmdline()) for process in psutil.Process(first.pid).children(recursive=True)]
    assert any("raylet" in command for command in commands)
    assert [command for command in commands if "monitor.py" in command or "dashboard.py" in command] == []


# Ray replaces the handlers of both while it starts; before and after they are one.
@pytest.mark.parametrize(
    ("moment", "number"),
    [(has_begun, signal.SIGTERM), (has_ray, signal.SIGINT), (has_ray, signal.SIGTERM), (has_actors, signal.SIGINT)],
)
def test_an_end_while_starting(
    tmp_path: Path, random_model: Path, moment: Callable[[Serving], bool], number: signal.Signals
) -> None:
    with serving(tmp_path / "run", str(random_model), *RANDOM) as cluster:
        wait_until(cluster, moment)
        code, out, err = cluster.stop(number)
        assert (code, out) == (130, "")
        # Python itself may say before that it dropped one interrupt, raised inside a destructor.
        assert err.splitlines()[-1] == "Interrupted before it was up; nothing is left running."
        assert cluster.leftovers() == []


def test_a_second_one_beside_the_first_is_killed_and_the_next_one_cleans_up_behind_it(
    first: Serving, tmp_path: Path, random_model: Path
) -> None:
    with serving(first.run_dir, str(random_model), *RANDOM, "--set", f"gateway.port={first.port}") as same:
        code, out, err = same.finish()
        assert (code, out) == (1, "")
        assert f"cannot listen on 127.0.0.1:{first.port}" in err
        assert err.count("\n") == 1
    options = (str(random_model), *RANDOM, "--set", "topology=disaggregated")
    with serving(tmp_path / "run", *options) as killed:
        killed.wait_ready()
        assert first.complete()[0] == killed.complete()[0] == 200
        assert len(killed.arenas()) == 2  # the pool's arena and the candidate buffer
        killed.send_signal(signal.SIGKILL)
        killed.finish()
        # Ray's own two agents wait a minute for the rest of Ray before they follow it.
        assert [line for line in killed.leftovers(40.0, besides="Agent") if line[0].isdigit()] == []
        with serving(tmp_path / "run", *options) as following:
            following.wait_ready()
            assert len(following.arenas()) == 2  # its own: both have the same run_dir
            assert following.stop()[0] == 0
            assert following.leftovers() == []
    assert first.complete()[0] == 200


async def test_a_second_signal_ends_what_runs_and_more_of_them_do_no_harm(first: Serving) -> None:
    stream = Stream()
    async with make_client(first.url) as client:
        reading = asyncio.create_task(stream_one(client, [5, 6, 7], 2000, stream))
        await stream.started.wait()
        first.actor("ColocatedWorker").suspend()  # so that it cannot end by itself
        first.send_signal(signal.SIGTERM)
        while (await client.get("/ready")).status_code == 200:  # noqa: ASYNC110  (another process closes the door)
            await asyncio.sleep(0.02)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            first.send_signal(number)
            await asyncio.sleep(0.3)
        code, out, err = await asyncio.to_thread(first.finish)
        await reading
    said = [line.partition(":")[0] for line in err.splitlines()]
    said = [word for word in said if word != "Draining"]  # which the second signal may come before
    assert (code, said) == (0, ["Sizes", "Stopping …"])
    assert "ready in" in out
    assert first.leftovers() == []
    assert not stream.is_done
