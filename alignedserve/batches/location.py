"""Where the files and the state of a cluster's batches are. Plain values, so that every process can be told."""

from dataclasses import dataclass
from pathlib import Path

from alignedserve.batches.interfaces import RecordStore
from alignedserve.batches.log.disk_log import DiskLogs
from alignedserve.batches.repository import BatchRepository
from alignedserve.batches.stores.disk_blobs import DiskBlobs
from alignedserve.batches.stores.redis_records import RedisRecords
from alignedserve.config.sections import BatchesConfig


@dataclass(frozen=True, slots=True)
class BatchLocation:
    """A state folder and a Redis."""

    folder: Path
    redis_url: str
    config: BatchesConfig

    @property
    def lock_path(self) -> Path:
        """Whoever holds this lock drives the batches."""
        return self.folder / "driver.lock"


@dataclass(frozen=True, slots=True)
class BatchStores:
    """The three stores of one process."""

    book: BatchRepository
    blobs: DiskBlobs
    logs: DiskLogs
    records: RecordStore


def open_stores(place: BatchLocation) -> BatchStores:
    """Connects to nothing yet. Raises StorageError where the folder cannot be used."""
    records = RedisRecords(place.redis_url, namespace=place.config.namespace)
    blobs, logs = DiskBlobs(place.folder / "files"), DiskLogs(place.folder / "results")
    return BatchStores(BatchRepository(records), blobs, logs, records)
