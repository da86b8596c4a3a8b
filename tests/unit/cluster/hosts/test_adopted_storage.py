"""The file of records when a driver takes over a cluster whose driver of batches goes on."""

from pathlib import Path

import pytest

from alignedserve.batches.location import RECORDS
from alignedserve.batches.stores import sqlite_file
from alignedserve.batches.stores.sqlite_records import SqliteRecords
from alignedserve.cluster.batch_storage import open_batch_storage
from alignedserve.config.sections import BatchesConfig, ClusterConfig
from alignedserve.core.errors import ResourceError
from alignedserve.messages.state import SetValue


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    """A cluster whose batches are in a folder of their own."""
    tmp_path.chmod(0o700)
    return ClusterConfig(batches=BatchesConfig(folder=str(tmp_path)))


async def test_the_file_is_left_to_the_driver_of_batches_that_has_it(
    config: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other cluster waits for the process that has the file, and is refused while it lives."""
    monkeypatch.setattr(sqlite_file, "_BUSY_S", 0.1)
    former = open_batch_storage(config)
    records = SqliteRecords(tmp_path / RECORDS)
    try:
        assert await records.commit([SetValue("a", b"1")], unchanged={})
        assert former.lock is not None
        former.lock.release()  # its driver was killed
        with pytest.raises(ResourceError, match="locked"):
            open_batch_storage(config)
        adopted = open_batch_storage(config, is_adopted=True)
        assert adopted.location == former.location
        assert await records.read(["a"]) == [b"1"]
    finally:
        await records.close()
    assert adopted.lock is not None
    adopted.lock.release()


def test_a_cluster_that_was_left_before_it_had_a_file_gets_one(config: ClusterConfig, tmp_path: Path) -> None:
    adopted = open_batch_storage(config, is_adopted=True)
    assert (tmp_path / RECORDS).exists()
    assert adopted.lock is not None
    adopted.lock.release()
