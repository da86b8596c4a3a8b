"""GPUs of a Ray that others started, which knows nothing of our environment: workers see all, as they ask by number."""

import json
import os
import subprocess
import sys

import pytest

from alignedserve.cluster.ray_node import SEES_EVERY_GPU

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# Two GPUs that Ray counts and nobody has.
DRIVER = """
import json, os, sys
import ray
from alignedserve.cluster.nodes.ray_nodes import gpu_options

@ray.remote(num_gpus=1, num_cpus=0)
class Worker:
    def seen(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

ray.init(num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False)
workers = Worker.remote(), Worker.options(**gpu_options(1.0)).remote()
print(json.dumps(ray.get([worker.seen.remote() for worker in workers])))
"""


def test_a_worker_sees_every_gpu_where_ray_would_show_its_own_alone() -> None:
    kept = {name: value for name, value in os.environ.items() if name not in (SEES_EVERY_GPU, "CUDA_VISIBLE_DEVICES")}
    environment = {**kept, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    by_ray, ours = json.loads(ended.stdout.splitlines()[-1])
    assert by_ray in ("0", "1")  # whichever of both was started first
    assert ours is None
