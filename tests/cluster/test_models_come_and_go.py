"""Models of a served cluster are added, replaced and removed while requests run; no request is lost."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.serving import COMMAND, EXACT, Serving, serving
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

_ORDER_S = 200.0


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Iterator[Serving]:
    models = (f"model={random_model}", f"other={random_model}")
    with serving(tmp_path_factory.mktemp("run"), *models, *EXACT) as served:
        served.wait_ready()
        wait_for_door(served)
        yield served
        code, _, err = served.stop()
        assert (code, served.leftovers(), served.arenas()) == (0, [], []), err


def wait_for_door(served: Serving) -> None:
    """Orders are taken once every model has answered, a moment after the first has."""
    ends_s = time.monotonic() + _ORDER_S
    while not list(served.run_dir.glob("*/admin.sock")):
        assert time.monotonic() < ends_s
        time.sleep(0.1)


def order(served: Serving, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ALIGNEDSERVE_RUN_DIR": str(served.run_dir)}
    command = [str(COMMAND), "models", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_ORDER_S, check=False)


def names(served: Serving) -> list[str]:
    return [one["id"] for one in json.loads(served.get("/v1/models")[1])["data"]]


def deployments(served: Serving) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(order(served, "status", "--json").stdout)["deployments"]
    return listed


def wait_for_two_of_each(served: Serving) -> None:
    """Wait until there are two workers and two routers: Ray ends a process a moment after it was asked to."""
    kinds = ("ColocatedWorker", "Router")
    wait_until(lambda: all(len(served.actors(kind)) == 2 for kind in kinds), 60.0, served.process_names, 0.05)


class Load:
    """Requests one after the other from several threads, until the end of the block."""

    def __init__(self, served: Serving, *models: str) -> None:
        self.statuses: list[int] = []
        self._is_over = threading.Event()
        self._served = served
        self._threads = [threading.Thread(target=self._ask, args=(model,)) for model in models for _ in range(2)]

    def _ask(self, model: str) -> None:
        while not self._is_over.is_set():
            self.statuses.append(self._served.complete(max_tokens=24, model=model)[0])

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def test_a_replacement_loses_no_request_and_touches_no_other_model(two_models: Serving, random_model: Path) -> None:
    before = {one["name"]: one["workers"] for one in deployments(two_models)}
    answer = two_models.complete(max_tokens=8)[1]["choices"][0]["text"]
    with Load(two_models, "model", "other") as load:
        done = order(two_models, "replace", "model", str(random_model))
    assert done.returncode == 0, done.stderr
    assert set(load.statuses) == {200}
    after = {one["name"]: one["workers"] for one in deployments(two_models)}
    assert after["other"] == before["other"]
    assert after["model"] != before["model"]
    wait_for_two_of_each(two_models)  # the old one's processes are gone
    assert names(two_models) == ["model", "other"]
    assert two_models.complete(max_tokens=8)[1]["choices"][0]["text"] == answer


def test_a_model_is_added_and_removed(two_models: Serving, random_model: Path) -> None:
    added = order(two_models, "add", str(random_model), "--name", "third", "--set", "decode.max_running_requests=4")
    assert (added.returncode, added.stdout.strip()) == (0, "third is served"), added.stderr
    assert names(two_models)[-1] == "third"
    assert two_models.complete(model="third")[0] == 200
    removed = order(two_models, "remove", "third")
    assert (removed.returncode, removed.stdout.strip()) == (0, "third is removed"), removed.stderr
    assert two_models.complete(model="third")[0] == 404
    wait_for_two_of_each(two_models)


def test_an_order_that_fails_changes_nothing(two_models: Serving, random_model: Path, tmp_path: Path) -> None:
    before = deployments(two_models)
    (tmp_path / "empty").mkdir()
    with Load(two_models, "model") as load:
        broken = order(two_models, "replace", "model", str(tmp_path / "empty"))
        large = order(two_models, "add", str(random_model), "--name", "x", "--set", "decode.kv_cache_bytes=4096GiB")
    assert (broken.returncode, large.returncode) == (1, 1)
    assert "beside the models that are served" in large.stderr
    assert set(load.statuses) == {200}
    assert [one["workers"] for one in deployments(two_models)] == [one["workers"] for one in before]


def test_status_shows_processes_models_and_memory(two_models: Serving) -> None:
    environment = {**os.environ, "ALIGNEDSERVE_RUN_DIR": str(two_models.run_dir)}
    command = [str(COMMAND), "status", "--json"]
    for _ in range(20):  # a process that an earlier test has killed may be starting again
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            break
        time.sleep(1.0)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(done.stdout)
    assert [one["name"] for one in shown["deployments"]] == ["model", "other"]
    processes = shown["processes"]
    names = [one["name"] for one in processes]
    assert "gateway-0" in names
    assert [sum(name.startswith(kind) for name in names) for kind in ("router", "worker-")] == [2, 2]
    assert all(one["state"] == "up" and one["memory_bytes"] > 10_000_000 for one in processes)
    assert [load["num_decode_workers"] for load in shown["loads"].values()] == [1, 1]
    assert 0 < shown["available_bytes"] < shown["total_bytes"]
    table = subprocess.run(command[:-1], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert all(name in table.stdout for name in names)
    assert "of the host's" in table.stdout


def test_a_lost_worker_of_one_model_is_no_matter_of_the_other(two_models: Serving) -> None:
    with Load(two_models, "model") as load:
        for worker in two_models.actors("ColocatedWorker")[-1:]:
            worker.kill()
        time.sleep(3.0)
    assert set(load.statuses) == {200}
    two_models.wait_ready()
