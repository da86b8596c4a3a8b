"""A device that falls off the bus in the middle of answers: its worker ends by that name, its requests go on."""

import sys
from pathlib import Path

import pytest

from tests.cluster import serving as serving_module
from tests.cluster.serving import EXACT, serving
from tests.cluster.streams import texts

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.promise, pytest.mark.timeout(500)]


def test_requests_of_a_fallen_gpu_go_on_elsewhere(
    tmp_path: Path, random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallen, command = tmp_path / "fallen", tmp_path / "alignedserve"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.cluster.falling_gpu {fallen} "$@"\n')
    command.chmod(0o700)
    monkeypatch.setattr(serving_module, "COMMAND", command)
    with serving(tmp_path / "run", str(random_model), *EXACT, "--set", "decode.count=2") as cluster:
        cluster.wait_ready()
        found = texts(cluster)
        assert fallen.exists()
        assert texts(cluster) == found  # on the worker that was spared, and on the one that was started again
        logs = "\n".join(path.read_text() for path in tmp_path.glob("run/*/logs/*.log"))
        assert "cpu stopped working (CUDA error: GPU has fallen off the bus); this worker ends" in logs
        code, _, err = cluster.stop()
        assert (code, cluster.leftovers(), cluster.arenas()) == (0, [], []), err
