"""Location of the files and the state of a cluster's batches, and the stores opened there by one process."""

from dataclasses import dataclass
from pathlib import Path

from alignedserve.batches.interfaces import BlobStore, RecordStore
from alignedserve.batches.log.disk_log import DiskLogs
from alignedserve.batches.repository import BatchRepository
from alignedserve.batches.stores.disk_blobs import DiskBlobs
from alignedserve.batches.stores.redis_records import RedisRecords
from alignedserve.config.sections import BatchesConfig


@dataclass(frozen=True, slots=True)
class BatchLocation:
    """A state folder and a Redis: plain values that can be sent to every process."""

    folder: Path
    redis_url: str
    config: BatchesConfig


@dataclass(frozen=True, slots=True)
class BatchStores:
    """Records, file contents and result logs of one process."""

    repository: BatchRepository
    blobs: BlobStore
    logs: DiskLogs
    lock_path: Path  # the process that holds this lock drives the batches


def open_stores(location: BatchLocation) -> BatchStores:
    """Open the stores without connecting yet. Raises StorageError where the folder cannot be used."""
    return stores_in(location.folder, RedisRecords(location.redis_url, namespace=location.config.namespace))


def stores_in(folder: Path, records: RecordStore) -> BatchStores:
    """Open stores in a folder, over any record store. Raises StorageError where the folder cannot be used."""
    blobs, logs = DiskBlobs(folder / "files"), DiskLogs(folder / "results")
    return BatchStores(BatchRepository(records), blobs, logs, folder / "driver.lock")
