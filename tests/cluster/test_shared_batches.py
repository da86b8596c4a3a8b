"""Servers that share a Redis and a folder, as pods do, share their batches."""

import signal
from pathlib import Path

import pytest

from tests.cluster.batch_jobs import NUM_LINES, BatchJob, check_answers, submit, wait_for
from tests.cluster.serving import EXACT, serving
from tests.support.servers.valkey import ValkeyServer

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_batch_goes_on_when_the_server_that_drives_it_is_killed(tmp_path: Path, random_model: Path) -> None:
    for name in ("redis", "state"):
        (tmp_path / name).mkdir(mode=0o700)
    redis = ValkeyServer(tmp_path / "redis")
    redis.start()
    options = (str(random_model), *EXACT, "--set", f"batches.folder={tmp_path / 'state'}")
    environment = {"ALIGNEDSERVE_REDIS_URL": redis.location.url}
    try:
        with serving(tmp_path / "driving", *options, environment=environment) as driving:
            driving.wait_ready()
            with serving(tmp_path / "other", *options, environment=environment) as other:
                other.wait_ready()
                job = submit(other.url, NUM_LINES)
                wait_for(driving, BatchJob(driving.url, job.batch_id, NUM_LINES), 20)
                driving.send_signal(signal.SIGKILL)
                check_answers(other, job)
    finally:
        redis.kill()
