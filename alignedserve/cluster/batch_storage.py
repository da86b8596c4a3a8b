"""Storage of a cluster's files and batches: a state folder on the head, with the records in a file unless a Redis is
named, and a bucket for contents where one is."""

import os
import sqlite3
from pathlib import Path
from typing import NamedTuple

from alignedserve.batches.location import RECORDS, BatchLocation
from alignedserve.batches.records import RECORDS_VERSION
from alignedserve.batches.stores.namespace_claim import folder_id
from alignedserve.batches.stores.object_location import ObjectStoreLocation
from alignedserve.batches.stores.redis_location import RedisLocation
from alignedserve.batches.stores.sqlite_records import begin_file, check_file
from alignedserve.cluster.run_folder import require_closed
from alignedserve.config.environment import (
    REDIS_URL_VARIABLE,
    STATE_DIR_VARIABLE,
    object_store_settings,
    redis_authority,
    redis_url,
    state_root,
)
from alignedserve.config.sections import BatchesConfig, ClusterConfig
from alignedserve.core.errors import ConfigError, ResourceError, StorageError
from alignedserve.disk.durable import lock_file


def prepare_records(path: Path, *, is_served: bool = False) -> None:
    """Check the file of records, or begin it. Raises ResourceError, with whatever was there left as it is. `is_served`:
    a process may have it open, alone, and opens it again where it is started anew; it is not checked then."""
    if path.exists():
        if not is_served:
            check_file(path)
        return
    if has_contents(path.parent):
        raise ResourceError(
            f"{path} is missing, and the files and results beside it would be removed without it: put it back, "
            "name the Redis that has their records, or set batches.folder to another folder"
        )
    try:
        begin_file(path)
    except sqlite3.Error as error:
        raise ResourceError(f"{path} cannot be made: {error}") from error
    except OSError as error:
        raise ResourceError(f"{path} cannot be made: {error.strerror}") from error


def has_contents(folder: Path) -> bool:
    contents = (*(folder / "files").glob("file-*"), *(folder / "results").glob("*.log"))
    return any(not content.name.endswith(".partial") for content in contents)


class StateLock:
    """Lock of a state folder, held until `release` or the end of this process. Raises ResourceError if another process
    holds it."""

    def __init__(self, folder: Path) -> None:
        self._file = lock_file(folder / "cluster.lock")
        if self._file is None:
            problem = f"another cluster keeps its batches in {folder}"
            raise ResourceError(f"{problem}; set batches.folder to another folder")

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class BatchStorage(NamedTuple):
    """Location of the batches, with the lock of their folder."""

    location: BatchLocation
    lock: StateLock | None  # of the folder; clusters may share one only with a Redis that they name


def open_batch_storage(config: ClusterConfig, *, is_adopted: bool = False) -> BatchStorage:
    """Prepare the state folder, and the file of records unless a Redis is named. Raises ResourceError. `is_adopted`:
    the cluster of a former driver goes on, and its driver of batches has the file."""
    folder, objects = _state_folder(config), _object_store(config.batches)
    named = _named_redis()
    location = BatchLocation(config.batches, folder, named, objects)
    if named is not None:
        if (folder / RECORDS).exists() and has_contents(folder):
            raise ResourceError(
                f"{folder} has files and results whose records are in {RECORDS}, and not in the Redis of "
                f"{REDIS_URL_VARIABLE}: they would be removed; set batches.folder to another folder"
            )
        _check_namespace(named, config.batches.namespace, folder)
        return BatchStorage(location, None)
    lock = StateLock(folder)
    try:
        prepare_records(folder / RECORDS, is_served=is_adopted)
    except BaseException:
        lock.release()
        raise
    return BatchStorage(location, lock)


def _named_redis() -> RedisLocation | None:
    url = redis_url()
    if url is None:
        return None
    scheme = url.partition("://")[0]
    if scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(f"{REDIS_URL_VARIABLE} must begin with redis://, rediss:// or unix://")
    from alignedserve.batches.stores.redis_records import check_redis

    location = RedisLocation(url, redis_authority() if scheme == "rediss" else None, is_local=scheme == "unix")
    try:
        problem = check_redis(location)
    except ValueError as error:
        raise ConfigError(f"{REDIS_URL_VARIABLE} is no URL of a Redis") from error
    if problem is not None:
        raise ResourceError(f"the Redis of {REDIS_URL_VARIABLE} cannot be used: {problem}")
    return location


def _check_namespace(location: RedisLocation, namespace: str, folder: Path) -> None:
    """Raise ResourceError where a cluster that keeps its batches elsewhere runs in this namespace, or its records are
    of a newer version."""
    from alignedserve.batches.stores.redis_records import is_claimed_by_other, newer_version

    if (version := newer_version(location, namespace)) is not None:
        raise ResourceError(
            f"the records under batches.namespace={namespace} in the Redis of {REDIS_URL_VARIABLE} are of a newer "
            f"version of AlignedServe (format {version}; this one knows {RECORDS_VERSION}); they were left as they are"
        )
    try:
        own_id = folder_id(folder)
    except OSError as error:
        raise ResourceError(f"{folder} cannot be read or written: {error.strerror}") from error
    if is_claimed_by_other(location, namespace, own_id):
        raise ResourceError(
            f"a cluster with another folder than {folder} runs under batches.namespace={namespace} in the Redis of "
            f"{REDIS_URL_VARIABLE}, and each would fail the batches of the other; set batches.namespace to another name"
        )


def _object_store(config: BatchesConfig) -> ObjectStoreLocation | None:
    if not config.is_in_bucket or config.folder is None:
        return None
    from alignedserve.batches.stores.object_blobs import ObjectBlobs

    settings = object_store_settings()
    location = ObjectStoreLocation(config.folder, config.s3_endpoint or settings.get("AWS_ENDPOINT_URL"), settings)
    try:
        ObjectBlobs(location).check()
    except StorageError as error:
        raise ResourceError(f"batches.folder {config.folder}: {error}") from error
    return location


def _state_folder(config: ClusterConfig) -> Path:
    named = None if config.batches.is_in_bucket else config.batches.folder
    folder = Path(named).expanduser().absolute() if named else state_root() / str(config.gateway.port)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_closed(folder, "files and batches")
    except OSError as error:
        problem = f"{folder} cannot hold files and batches: {error.strerror}"
        raise ResourceError(f"{problem}; set {STATE_DIR_VARIABLE} or batches.folder to another folder") from error
    return folder
