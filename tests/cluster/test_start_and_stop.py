"""Starting, stopping and killing `alignedserve serve`: exit codes, and nothing left behind."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.serving import Serving, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

RANDOM = ("--set", "model.random_weights=true")


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


@pytest.mark.parametrize("moment", [has_begun, has_ray, has_actors])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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


def test_an_end_while_serving_even_an_impatient_one(tmp_path: Path, random_model: Path) -> None:
    with serving(tmp_path / "run", str(random_model), *RANDOM) as cluster:
        cluster.wait_ready()
        time.sleep(1.0)  # the command asks for itself, and then says that it is ready
        cluster.send_signal(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            time.sleep(0.3)
            cluster.send_signal(number)
        code, out, err = cluster.finish()
        sizes, *rest = err.splitlines()
        assert (code, sizes.partition(":")[0], rest) == (0, "Sizes", ["Stopping …"])
        assert "ready in" in out
        assert cluster.leftovers() == []


def test_a_second_one_beside_the_first(tmp_path: Path, random_model: Path) -> None:
    with serving(tmp_path / "first", str(random_model), *RANDOM) as first:
        first.wait_ready()
        with serving(tmp_path / "first", str(random_model), *RANDOM, "--set", f"gateway.port={first.port}") as same:
            code, out, err = same.finish()
            assert (code, out) == (1, "")
            assert f"cannot listen on 127.0.0.1:{first.port}" in err
            assert err.count("\n") == 1
        with serving(tmp_path / "second", str(random_model), *RANDOM) as second:
            second.wait_ready()
            assert first.complete()[0] == second.complete()[0] == 200
            assert second.stop()[0] == 0
            assert second.leftovers() == []
        assert first.complete()[0] == 200


def test_the_next_one_cleans_up_behind_a_killed_one(tmp_path: Path, random_model: Path) -> None:
    with serving(tmp_path / "run", str(random_model), *RANDOM) as killed:
        killed.wait_ready()
        assert len(killed.arenas()) == 2  # the pool's arena and the candidate buffer
        killed.send_signal(signal.SIGKILL)
        killed.finish()
        # Ray's own two agents wait a minute for the rest of Ray before they follow it.
        assert [line for line in killed.leftovers(10.0) if line[0].isdigit() and "Agent'" not in line] == []
        with serving(tmp_path / "run", str(random_model), *RANDOM) as following:
            following.wait_ready()
            assert len(following.arenas()) == 2  # its own: both have the same run_dir
            assert following.stop()[0] == 0
            assert following.leftovers() == []
