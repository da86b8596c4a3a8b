"""Location of the files and the state of a cluster's batches, and the stores opened there by one process."""

from dataclasses import dataclass, replace
from pathlib import Path

from alignedserve.batches.interfaces import BlobStore, ContentStore, RecordStore, ResultLogs
from alignedserve.batches.log.disk_log import DiskLogs
from alignedserve.batches.remote.remote_stores import RemoteBlobs, RemoteLogs, RemoteRecords
from alignedserve.batches.remote.state_client import StateClient
from alignedserve.batches.repository import BatchRepository
from alignedserve.batches.responses.response_repository import ResponseStores, response_stores
from alignedserve.batches.stores.disk_blobs import DiskBlobs
from alignedserve.batches.stores.object_location import ObjectStoreLocation
from alignedserve.batches.stores.redis_location import RedisLocation
from alignedserve.batches.stores.sqlite_records import SqliteRecords
from alignedserve.config.sections import BatchesConfig

RECORDS = "records.db"  # in the state folder, which the driver of batches alone opens


@dataclass(frozen=True, slots=True)
class BatchLocation:
    """Places of records, contents and results for one node: plain values that can be sent to each of its processes."""

    config: BatchesConfig
    folder: Path | None  # on this host; None: on the head, behind its state server
    redis: RedisLocation | None  # None: records are in the folder, behind the state server for all but the driver
    objects: ObjectStoreLocation | None = None  # where contents are; None: in the folder

    def elsewhere(self) -> "BatchLocation":
        """Return the location as other nodes have it."""
        return replace(self, folder=None, redis=None if self.redis is None or self.redis.is_local else self.redis)

    @property
    def needs_state_server(self) -> bool:
        """Return whether a gateway there reaches some of it through the state server."""
        return self.folder is None or self.redis is None


@dataclass(frozen=True, slots=True)
class SharedState:
    """State that the gateways of a cluster share."""

    batches: BatchLocation | None = None  # None: no files and batches, and no state server
    gateways: tuple[str, ...] = ()  # that are there from the start


@dataclass(frozen=True, slots=True)
class BatchStores:
    """Records, file contents and results of a gateway."""

    repository: BatchRepository
    blobs: ContentStore
    logs: ResultLogs
    responses: ResponseStores


@dataclass(frozen=True, slots=True)
class DriverStores(BatchStores):
    """Stores of the process that drives the batches."""

    blobs: BlobStore
    logs: DiskLogs
    records: RecordStore  # of the repository
    lock_path: Path  # the process that holds this lock drives the batches


def open_stores(location: BatchLocation, client: StateClient) -> BatchStores:
    """Open a gateway's stores without connecting yet. Raises StorageError where the folder cannot be used."""
    records = _in_redis(location) or RemoteRecords(client)
    if location.folder is not None:
        return stores_in(location.folder, records, _objects(location))
    blobs: ContentStore = _objects(location) or RemoteBlobs(client)
    return BatchStores(BatchRepository(records), blobs, RemoteLogs(client), response_stores(records))


def open_driver_stores(location: BatchLocation) -> DriverStores:
    """Open the stores on the head, without connecting yet. Raises StorageError where the folder cannot be used."""
    assert location.folder is not None, "the head's stores without their folder"
    records = _in_redis(location) or SqliteRecords(location.folder / RECORDS)
    return stores_in(location.folder, records, _objects(location))


def _in_redis(location: BatchLocation) -> RecordStore | None:
    if location.redis is None:
        return None
    # Its client is loaded where it is used.
    from alignedserve.batches.stores.redis_records import RedisRecords

    return RedisRecords(location.redis, namespace=location.config.namespace)


def _objects(location: BatchLocation) -> BlobStore | None:
    if location.objects is None:
        return None
    from alignedserve.batches.stores.object_blobs import ObjectBlobs

    return ObjectBlobs(location.objects)


def stores_in(folder: Path, records: RecordStore, blobs: BlobStore | None = None) -> DriverStores:
    """Open stores in a folder, over any record store. Raises StorageError where the folder cannot be used.

    `blobs`: where contents are; None: in the folder."""
    logs = DiskLogs(folder / "results")
    blobs = blobs or DiskBlobs(folder / "files")
    responses = response_stores(records)
    return DriverStores(BatchRepository(records), blobs, logs, responses, records, folder / "driver.lock")
