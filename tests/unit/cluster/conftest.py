"""A driver's cluster, and what it announces."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from alignedserve.cluster import serving_cluster as running
from alignedserve.cluster.deployments.orders import AdminRequest, Answer
from alignedserve.cluster.hosts import ray_directory, succession
from alignedserve.cluster.hosts.record import ClusterRecord
from alignedserve.cluster.serving_cluster import ServingCluster
from tests.unit.cluster.driven_cluster import NODES, started


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ServingCluster]:
    made = started(tmp_path, {"gateway": {"host": "0.0.0.0"}, "topology": "disaggregated"})
    yield made
    made._leave_ray()
    logging.getLogger("alignedserve").setLevel(logging.NOTSET)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Ray's key-value store."""
    values: dict[str, bytes] = {}
    monkeypatch.setattr(ray_directory, "put", values.__setitem__)
    monkeypatch.setattr(ray_directory, "get", values.get)
    monkeypatch.setattr(ray_directory, "delete", lambda key: values.pop(key, None))
    monkeypatch.setattr(ray_directory, "keys", lambda prefix: sorted(one for one in values if one.startswith(prefix)))
    return values


@pytest.fixture
def announced(store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> list[ClusterRecord]:
    records: list[ClusterRecord] = []
    monkeypatch.setattr(running, "write_record", records.append)
    monkeypatch.setattr(running, "alive_nodes", lambda: NODES[:2])
    monkeypatch.setattr(succession, "answers_so_far", lambda calls: {})
    return records


@pytest.fixture
def answered(
    cluster: ServingCluster, announced: list[ClusterRecord], store: dict[str, bytes]
) -> Callable[[AdminRequest], Answer | None]:
    """What a driver answers to an order when it has looked once; None: it is being carried out."""

    def give(order: AdminRequest) -> Answer | None:
        store["c/order/x"] = msgspec.json.encode(order)
        assert cluster.check()
        found = store.pop("c/answer/x", None)
        assert (found is None) == ("c/order/x" in store)
        return msgspec.json.decode(found, type=Answer) if found is not None else None

    return give
