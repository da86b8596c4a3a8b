"""Ray's own autoscaler adds a node under load, it serves, and it is given back and removed."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.fake_cloud import fake_cloud
from tests.cluster.serving import COMMAND, Serving, serving
from tests.cluster.warm_command import WarmCommand

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

NUM_CLIENTS = 6
Status = Callable[[], dict[str, Any]]
SETTINGS = (
    *("engine.threads_per_worker=1", "batches.enabled=false"),
    *("decode.max_running_requests=2", "decode.max_waiting_requests=0"),
    *("scaling.max_nodes=2", "scaling.up_after_s=1", "scaling.down_after_s=8"),
)


@pytest.fixture(scope="module")
def cloud() -> Iterator[dict[str, str]]:
    with fake_cloud(num_workers=1, idle_minutes=0.1) as joining:
        yield joining


@pytest.fixture(scope="module")
def status(cloud: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Status]:
    """Ask for the cluster's status."""
    environment = os.environ | cloud

    def asked() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(command.run(("status", "--json"), environment).stdout)
        return found

    with WarmCommand(tmp_path_factory.mktemp("printed"), "cluster.hosts", environment) as command:
        yield asked


@pytest.fixture(scope="module")
def served(cloud: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    with serving(tmp_path_factory.mktemp("run"), "--nodes", "1", *options, environment=cloud) as made:
        made.wait_ready()
        yield made


def driver_log(cloud: dict[str, str]) -> str:
    """Return what `alignedserve logs driver` prints."""
    environment = os.environ | cloud
    done = subprocess.run(
        [COMMAND, "logs", "driver"], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    return done.stdout


SEEN_BY_RAY = """
import json, ray
ray.init(log_to_driver=False, logging_level="ERROR")
table = ray.util.placement_group_table().values()
groups = [one["bundles"][0] for one in table if one["state"] == "CREATED"]
print(json.dumps([groups, ray.cluster_resources()["CPU"] - ray.available_resources()["CPU"]]))
"""


def used(cloud: dict[str, str]) -> list[Any]:
    """Return the bundles of the groups that are placed, and how many CPUs are not free, as another job sees it."""
    asking = [sys.executable, "-c", SEEN_BY_RAY]
    done = subprocess.run(asking, env=os.environ | cloud, capture_output=True, text=True, timeout=180, check=True)
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def wait_until(holds: Callable[[dict[str, Any]], bool], status: Status, timeout_s: float = 240.0) -> float:
    """Return the seconds until the cluster's status is as wanted."""
    began_s = time.monotonic()
    while not holds(found := status()):
        assert time.monotonic() - began_s < timeout_s, found
        time.sleep(0.5)
    return time.monotonic() - began_s


class Clients:
    """Clients that ask without a pause, as long as the context lasts; every answer must be exact."""

    def __init__(self, served: Serving) -> None:
        self._served = served
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(NUM_CLIENTS)]
        self.answers: list[tuple[int, str]] = []

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._is_over.is_set():
            code, answer = self._served.chat("spell otter", max_tokens=32, temperature=0, model="pocket")
            text = answer["choices"][0]["message"]["content"] if code == 200 else str(answer)
            self.answers.append((code, text))


def test_a_node_comes_with_the_load_and_goes_with_it(cloud: dict[str, str], served: Serving, status: Status) -> None:
    wait_until(lambda found: found["load"] is not None, status)
    assert len(status()["nodes"]) == 1
    with Clients(served) as clients:
        came_s = wait_until(lambda found: found["load"]["num_decode_workers"] == 2, status)
        wait_until(lambda found: found["load"]["num_decoding"] > 2, status)  # more than one worker decodes
        assert used(cloud) == [[{"CPU": 1.0}] * 2, 2.0]
        assert [sorted(node["actors"]) for node in status()["nodes"]][1] == ["gateway-1", "worker-1"]
    gone_s = wait_until(lambda found: len(found["nodes"]) == 1, status)
    assert used(cloud) == [[{"CPU": 1.0}], 1.0]
    said = driver_log(cloud)
    assert "is not needed" in said
    assert "has drained" in said
    assert set(clients.answers) == {(200, "o t t e r")}
    print(f"the node served after {came_s:.1f} s, and was removed {gone_s:.1f} s after the load")
