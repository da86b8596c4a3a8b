"""Blobs as objects of a bucket with S3's interface, named by generated ids.

An upload is kept in a file without a name until it is whole: an object is written in one step, and a client that goes
away leaves nothing in the bucket. What a gateway leaves that dies while it writes an object, the parts of a multipart
upload, is no object; buckets have a lifecycle rule for those."""

import asyncio
import contextlib
import datetime
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import IO

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from alignedserve.batches.interfaces import BlobReader, BlobWriter
from alignedserve.batches.records import FileId, parsed_file_id
from alignedserve.batches.stores.disk_blobs import disk_errors
from alignedserve.batches.stores.object_location import ObjectStoreLocation
from alignedserve.core.errors import StorageDamaged, StorageError, StoreUnavailable

logger = logging.getLogger(__name__)

_SCHEME = "s3://"
_TIMEOUT = datetime.timedelta(seconds=20)  # of one request; a large object takes several
_MAX_RETRIES = 3
_MAX_RETRYING = datetime.timedelta(seconds=30)
_PART_BYTES = 4 << 20  # of an object, in one request
_REFUSED = (PermissionDeniedError, UnauthenticatedError, PermissionError)


class ObjectBlobs:
    """A BlobStore. Every process of every host may have its own."""

    def __init__(self, location: ObjectStoreLocation) -> None:
        with _object_errors():
            self._store = _opened(location)

    async def begin(self, file_id: FileId) -> BlobWriter:
        return _ObjectWriter(self._store, _path(file_id))

    async def chunks(self, file_id: FileId, start: int = 0) -> AsyncIterator[bytes]:
        # A request for each part: one for the whole object would have to end, however slow the client, within _TIMEOUT.
        path, offset = _path(file_id), start
        with _object_errors():
            num_bytes = (await obstore.head_async(self._store, path))["size"]
        while offset < num_bytes:
            end = min(offset + _PART_BYTES, num_bytes)
            with _object_errors():
                part = await obstore.get_range_async(self._store, path, start=offset, end=end)
            yield bytes(part)
            offset = end

    async def open(self, file_id: FileId) -> BlobReader:
        """The object is copied into a file without a name."""
        with disk_errors("a copy of an object"):
            copy = tempfile.TemporaryFile()  # noqa: SIM115  (closed by the reader)
        try:
            async for chunk in self.chunks(file_id):
                with disk_errors("a copy of an object"):
                    await asyncio.to_thread(_write_through, copy, chunk)
        except BaseException:
            await asyncio.to_thread(_close, copy)
            raise
        return _CopyReader(copy)

    async def remove(self, file_id: FileId) -> None:
        with _object_errors(), contextlib.suppress(NotFoundError, FileNotFoundError):
            await obstore.delete_async(self._store, _path(file_id))

    async def committed_before(self, age_s: float) -> list[FileId]:
        before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_s)
        file_ids: list[FileId] = []
        with _object_errors():
            async for page in obstore.list(self._store, "files", chunk_size=1000):
                named = ((parsed_file_id(blob["path"].removeprefix("files/")), blob["last_modified"]) for blob in page)
                file_ids += [file_id for file_id, modified in named if file_id is not None and modified < before]
        return sorted(file_ids)

    async def remove_abandoned(self, age_s: float) -> int:
        """See BlobStore: none is left, as an upload is no object before it is whole."""
        return 0

    def check(self) -> None:
        """Check that the bucket answers and lets these credentials in. Raises StorageError."""
        with _object_errors():
            next(iter(obstore.list(self._store, "files", chunk_size=1)), None)


class _ObjectWriter:
    def __init__(self, store: S3Store, path: str) -> None:
        self._store = store
        self._path = path
        with disk_errors("an upload"):
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `discard`)

    async def write(self, chunk: bytes) -> None:
        with disk_errors("an upload"):
            await asyncio.to_thread(_write_through, self._file, chunk)

    async def commit(self) -> None:
        self._file.seek(0)
        with _object_errors():
            await obstore.put_async(self._store, self._path, self._file)

    async def discard(self) -> None:
        await asyncio.to_thread(_close, self._file)


def _write_through(file: IO[bytes], chunk: bytes) -> None:
    file.write(chunk)
    file.flush()


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # a full disk, once more
        file.close()


class _CopyReader:
    def __init__(self, copy: IO[bytes]) -> None:
        self._copy = copy

    def read_at(self, offset: int, length: int) -> bytes:
        with disk_errors("a copy of an object"):
            return os.pread(self._copy.fileno(), length, offset)

    def close(self) -> None:
        self._copy.close()


def _path(file_id: FileId) -> str:
    assert parsed_file_id(file_id) is not None, "a path from something that is no id"
    return f"files/{file_id}"


@contextlib.contextmanager
def _object_errors() -> Iterator[None]:
    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        logger.debug("an object is not there: %s", error)
        raise StorageDamaged("the object store has no such object") from error
    except (BaseError, OSError, ValueError) as error:
        logger.warning("the object store: %.500s", error)
        if isinstance(error, _REFUSED) or "403 Forbidden" in str(error):
            problem = "the object store refuses these credentials"
            raise StorageError(f"{problem}: see AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
        if "NoSuchBucket" in str(error):
            raise StorageError("the object store has no such bucket") from error
        raise StoreUnavailable("The object store of files cannot be reached now.") from error


def _opened(location: ObjectStoreLocation) -> S3Store:
    bucket, _, prefix = location.url.removeprefix(_SCHEME).partition("/")
    settings = {name.lower(): value for name, value in location.settings.items()}
    endpoint = {"aws_endpoint_url": location.endpoint} if location.endpoint else {}
    return S3Store(
        bucket,
        prefix=prefix or None,
        config=settings | endpoint,  # type: ignore[arg-type]  # whatever AWS_ names there are
        client_options={
            "allow_http": (location.endpoint or "").startswith("http://"),
            "timeout": _TIMEOUT,
            "connect_timeout": datetime.timedelta(seconds=5),
        },
        retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": _MAX_RETRYING},
    )
