"""`alignedserve plan` for this kind of machine, and a live cluster from the file that it writes."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.cluster.serving import COMMAND, MODEL, serving

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

PROFILE = Path(__file__).parents[2] / "benchmarks" / "results" / "simulation" / "profile_pocket_float32.json"
LINE = "prompt=uniform(20,200), output=8, rate=4, ttft=2, tpot=0.5"


def test_a_cluster_starts_from_the_file_of_its_plan(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    options = ("--workload", LINE, "--hardware", f"2x fitted:{PROFILE}", "--duration", "10", "--output", str(folder))
    planned = subprocess.run(
        [COMMAND, "plan", *options, "--processes", "1"], capture_output=True, text=True, timeout=120, check=False
    )
    assert planned.returncode == 0, planned.stderr
    found = json.loads((folder / "plan.json").read_text())["plan"]
    assert (found["topology"], found["num_decode"], found["policy"]) == ("elastic", 1, "aligned_slo")
    named = ("--set", f"model.served_model_name={MODEL}")
    with serving(tmp_path / "run", "--config", str(folder / "plan.yaml"), *named) as cluster:
        cluster.wait_ready()
        status, answer = cluster.chat("Repeat: one two three")
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] > 0
        assert len(cluster.actors("ColocatedWorker")) == 1
        cluster.wait_idle()
        code, out, err = cluster.stop()
        assert (code, cluster.leftovers()) == (0, []), err
        assert "1 router, 1 elastic worker" in out
