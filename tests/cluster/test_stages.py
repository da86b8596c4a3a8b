"""A worker of two stages, served for real: the same answers, also after a stage was killed, and none left behind."""

from pathlib import Path

import pytest

from tests.cluster.serving import EXACT, Serving, serving
from tests.cluster.streams import texts
from tests.support.child_processes import children_running

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

STAGES = ("--set", "engine.pipeline_parallel=2")


def test_a_killed_stage_ends_its_worker_and_requests_go_on(
    separate_cluster: Serving, tmp_path: Path, random_model: Path
) -> None:
    """Two workers, so that requests move between them, and caches of prefixes through the pool."""
    with serving(tmp_path / "run", str(random_model), *EXACT, *STAGES, "--set", "decode.count=2") as cluster:
        cluster.wait_ready()
        expected = texts(separate_cluster)
        assert texts(cluster) == expected
        (stage,) = children_running("plugins.stages", cluster.actors("ColocatedWorker")[0])
        stage.kill()
        assert texts(cluster) == expected
        code, _, err = cluster.stop()
        assert (code, cluster.leftovers(), cluster.arenas()) == (0, [], []), err
