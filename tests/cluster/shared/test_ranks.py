"""Workers of two ranks, served for real: the same answers, also after a rank was killed, and no rank left behind."""

import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.serving import EXACT, Serving, serving
from tests.cluster.streams import texts
from tests.support.child_processes import children_running

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

RANKS = ("--set", "engine.tensor_parallel=2")
SEPARATE = ("--set", "topology=disaggregated")
FOLLOWER = "follower_process"


def wait_gone(process: psutil.Process, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{process} goes on"
        time.sleep(0.1)


def test_a_killed_rank_ends_its_worker_and_requests_go_on(
    separate_cluster: Serving, tmp_path: Path, random_model: Path
) -> None:
    with serving(tmp_path / "run", str(random_model), *EXACT, *RANKS, "--set", "decode.count=2") as cluster:
        cluster.wait_ready()
        expected = texts(separate_cluster)
        assert texts(cluster) == expected
        worker = cluster.actors("ColocatedWorker")[0]
        (rank,) = children_running(FOLLOWER, worker)
        rank.kill()
        assert texts(cluster) == expected
        wait_gone(worker)
        code, _, err = cluster.stop()
        assert (code, cluster.leftovers(), cluster.arenas()) == (0, [], []), err


def test_a_killed_worker_takes_its_ranks_along(separate_cluster: Serving, tmp_path: Path, random_model: Path) -> None:
    """Separate workers: caches of two ranks go through the pool and candidate buffers."""
    with serving(tmp_path / "run", str(random_model), *EXACT, *RANKS, *SEPARATE) as cluster:
        cluster.wait_ready()
        expected = texts(separate_cluster)
        assert texts(cluster) == expected
        worker = cluster.actors("DecodeWorker")[0]
        ranks = children_running(FOLLOWER, worker)
        assert len(ranks) == 1
        worker.kill()
        for rank in ranks:
            wait_gone(rank)
        assert texts(cluster) == expected
        code, _, err = cluster.stop()
        assert (code, cluster.leftovers(), cluster.arenas()) == (0, [], []), err
