"""Batches on a real cluster: whatever is killed, every line ends once, with the answer that it has alone."""

import pytest

from tests.cluster.batch_jobs import NUM_LINES, check_answers, submit, wait_for
from tests.cluster.serving import Serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def test_a_batch_whose_worker_is_killed(cluster: Serving) -> None:
    batch = submit(cluster.url, NUM_LINES // 3)
    wait_for(cluster, batch, 10)
    cluster.actor("ColocatedWorker").kill()
    check_answers(cluster, batch)


@pytest.mark.slow
@pytest.mark.promise
def test_a_batch_whose_driver_is_killed_twice(cluster: Serving) -> None:
    batch = submit(cluster.url, NUM_LINES)
    wait_for(cluster, batch, 20)
    cluster.actor("Batch").kill()
    wait_for(cluster, batch, 100)
    cluster.actor("Batch").kill()
    wait_for(cluster, batch, 180)
    cluster.actor("Gateway").kill()
    check_answers(cluster, batch)
