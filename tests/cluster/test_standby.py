"""A worker that stands by: it takes over the requests of one that is killed, which then stands by in its turn."""

import asyncio
import re
from pathlib import Path

import psutil
import pytest

from tests.cluster.serving import EXACT, Serving, serving, token_prompts
from tests.cluster.streams import Stream, all_started, check_whole, stream_all, streams_through

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TOKENS = 600
STANDBY = (*EXACT, "--set", "decode.count=1", "--set", "decode.standby=1")


def answers_by_worker(cluster: Serving) -> dict[str, int]:
    """Return how many answers each worker has finished."""
    found = re.findall(r'^alignedserve_answers_total\{.*worker="([^"]+)".*\} (\S+)$', cluster.get("/metrics")[1], re.M)
    return {_process_name(worker): int(float(count)) for worker, count in found}


def _process_name(label: str) -> str:
    """Return the name of a worker's process: metrics have its former name as their label."""
    return label.replace("decode-", "worker-")


def process_of(cluster: Serving, worker: str) -> psutil.Process:
    """Return the process of a worker, which writes to the log of its name."""
    processes = cluster.actors("ColocatedWorker")
    return next(one for one in processes if any(file.path.endswith(f"/{worker}.log") for file in one.open_files()))


async def test_it_takes_over_what_a_killed_worker_had(tmp_path: Path, random_model: Path) -> None:
    with serving(tmp_path / "run", str(random_model), *STANDBY) as cluster:
        cluster.wait_ready()
        prompts = token_prompts(8, max_len=40)
        right = await stream_all(cluster.url, prompts, NUM_TOKENS)
        (active,) = answers_by_worker(cluster)  # one of the two has had no work
        for _ in range(2):
            before = answers_by_worker(cluster)
            streams = [Stream() for _ in prompts]
            reading = asyncio.create_task(streams_through(cluster.url, prompts, streams, NUM_TOKENS))
            await all_started(streams)
            process_of(cluster, active).kill()
            await reading
            check_whole(streams, right)
            new = {name: count - before.get(name, 0) for name, count in answers_by_worker(cluster).items()}
            (active,) = {name for name, count in new.items() if count}
            assert new[active] >= len(prompts)  # and perhaps the token of a probe
        assert cluster.stop()[0] == 0
