"""Processes that Ray has started for a cluster and that nobody has any more are found by the cluster's token."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from alignedserve.cluster.local_ray.node_watch import kill_all, orphans_of

pytestmark = pytest.mark.slow

# Starts a process that outlives it, as a node process of Ray that is ended while it starts.
_STARTS = """
import subprocess
from subprocess import DEVNULL
print(subprocess.Popen(["sleep", "60"], stdout=DEVNULL, stderr=DEVNULL).pid)
"""


def test_orphans_of_one_cluster_are_ended_and_nothing_else(tmp_path: Path) -> None:
    def orphan(name: str) -> psutil.Process:
        environment = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(tmp_path / name / "ray_token")}
        started = subprocess.run([sys.executable, "-c", _STARTS], env=environment, capture_output=True, check=True)
        return psutil.Process(int(started.stdout))

    assert orphans_of(Path(os.fsdecode(b"/no\xff"))) == []  # no text at all
    ours, theirs = orphan("ours"), orphan("theirs")
    with subprocess.Popen(
        ["sleep", "60"], env={**os.environ, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "ours" / "ray_token")}
    ) as child:
        try:
            assert orphans_of(tmp_path / "ours") == [ours]
            kill_all(orphans_of(tmp_path / "ours"))
            assert orphans_of(tmp_path / "ours") == []
            assert theirs.is_running()
            assert child.poll() is None
        finally:
            child.kill()
            theirs.kill()
