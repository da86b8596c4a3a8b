"""A driver's cluster, and what it announces."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.cluster.hosts import cluster as running
from alignedserve.cluster.hosts.cluster import ClusterOnHosts
from alignedserve.cluster.hosts.record import ClusterRecord
from tests.unit.cluster.driven_cluster import started


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterOnHosts]:
    made = started(tmp_path, {"gateway": {"host": "0.0.0.0"}, "topology": "disaggregated"})
    yield made
    made._leave_ray()
    logging.getLogger("alignedserve").setLevel(logging.NOTSET)


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[ClusterRecord]:
    records: list[ClusterRecord] = []
    monkeypatch.setattr(running, "write_record", records.append)
    monkeypatch.setattr(running, "is_asked_to_stop", lambda cluster_id: False)
    monkeypatch.setattr(running, "take_orders", lambda cluster_id: [])
    return records
