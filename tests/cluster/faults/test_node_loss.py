"""Ray's own processes on one host: where they listen, and what follows when they are stopped or lost."""

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.batch_jobs import NUM_LINES, check_answers, submit, wait_for
from tests.cluster.serving import EXACT, Serving, serving
from tests.harnesses.hosts.port_scan import listeners_of
from tests.support.busy_processes import busy_processes

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.promise, pytest.mark.alone, pytest.mark.timeout(900)]

LOAD = 20
STOPPED_S = 15.0
GONE_S = 90.0  # for everything to be ended after a loss: it is noticed in two seconds on an idle machine


@pytest.fixture(scope="module")
def served_cluster(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("node"), str(random_model), *EXACT) as served:
        served.wait_ready()
        yield served


@pytest.fixture
def served(served_cluster: Serving) -> Serving:
    """The cluster of this module, whole and idle."""
    served_cluster.wait_ready()
    served_cluster.wait_idle()
    return served_cluster


def processes_under(cluster: Serving) -> list[psutil.Process]:
    return psutil.Process(cluster.pid).children(recursive=True)


def pids_of_ray_and_actors(cluster: Serving) -> set[int]:
    names = ("raylet", "gcs_server")
    raylet = cluster.ray_process("raylet")
    return {cluster.ray_process(name).pid for name in names} | {one.pid for one in raylet.children()}


def test_nothing_listens_beyond_loopback_and_nobody_else_can_enter_its_folder(served: Serving) -> None:
    own = {served.pid, *(one.pid for one in processes_under(served))}
    listing = subprocess.run(["ss", "-tlnpH"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in listing.splitlines() if any(f"pid={pid}," in line for pid in own)]
    addresses = {one.address.removeprefix("[::ffff:").removesuffix("]") for one in listeners_of("\n".join(lines))}
    assert addresses == {"127.0.0.1"}
    (folder,) = (path for path in served.run_dir.iterdir() if path.is_dir())
    assert folder.stat().st_mode & 0o077 == 0
    opened = {file.path for one in processes_under(served) for file in one.open_files()}
    assert [path for path in opened if path.startswith("/tmp/ray")] == []


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_process_of_ray_that_is_stopped_for_a_while_goes_on(served: Serving, name: str) -> None:
    before = pids_of_ray_and_actors(served)
    stopped = served.ray_process(name)
    stopped.suspend()
    try:
        ends_s = time.monotonic() + STOPPED_S
        while time.monotonic() < ends_s:
            assert served.complete()[0] == 200
    finally:
        stopped.resume()
    time.sleep(5.0)  # for a verdict on its silence
    assert served.complete()[0] == 200
    assert before <= pids_of_ray_and_actors(served)


def test_a_starved_machine_and_a_stopped_driver_are_no_loss(served: Serving) -> None:
    before = pids_of_ray_and_actors(served)
    driver = psutil.Process(served.pid)
    with busy_processes(LOAD):
        driver.suspend()
        time.sleep(10.0)
        driver.resume()
        ends_s = time.monotonic() + STOPPED_S
        while time.monotonic() < ends_s:
            assert served.complete()[0] == 200
    assert before <= pids_of_ray_and_actors(served)


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_when_ray_is_lost_all_starts_again_and_a_batch_goes_on(served: Serving, name: str) -> None:
    batch = submit(served.url, NUM_LINES)
    wait_for(served, batch, 20)
    before, arenas = [*processes_under(served)], served.arenas()
    served.ray_process(name).kill()
    assert psutil.wait_procs(before, timeout=GONE_S)[1] == []
    served.wait_ready()
    assert set(arenas).isdisjoint(served.arenas())
    check_answers(served, batch)


def test_it_ends_with_its_own_code_where_it_is_not_to_start_again(tmp_path: Path, random_model: Path) -> None:
    wanted = ("--set", "links.restart_on_node_loss=false")
    with serving(tmp_path / "run", str(random_model), *EXACT, *wanted) as cluster:
        cluster.wait_ready()
        cluster.ray_process("raylet").send_signal(signal.SIGKILL)
        code, out, err = cluster.finish()
        assert code == 75
        last = err.splitlines()[-1]
        assert last.startswith("error: Ray's node process (raylet) has ended by signal 9")
        assert "raylet)" not in out
        assert cluster.leftovers() == []
