"""Blobs as files of one folder, named by generated ids. A file appears under its id only when it is complete."""

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from alignedserve.batches.interfaces import BlobReader, BlobWriter
from alignedserve.batches.records import FileId, parsed_file_id
from alignedserve.core.errors import StorageDamaged, StorageError, StorageFull
from alignedserve.disk.durable import publish, write_all

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def disk_errors(subject: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(f"no space left on the disk for {subject}") from error
        raise StorageError(f"{subject} cannot be written or read: {error.strerror or error}") from error


CHUNK_BYTES = 256 * 1024
_PARTIAL = ".partial"


class DiskBlobs:
    """A BlobStore. The folder may be shared by hosts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with disk_errors("files"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def begin(self, file_id: FileId) -> BlobWriter:
        return _DiskWriter(self._path(file_id))

    async def chunks(self, file_id: FileId, start: int = 0) -> AsyncIterator[bytes]:
        reader = await self.open(file_id)
        try:
            offset = start
            while chunk := await asyncio.to_thread(reader.read_at, offset, CHUNK_BYTES):
                yield chunk
                offset += len(chunk)
        finally:
            reader.close()

    async def open(self, file_id: FileId) -> BlobReader:
        return _DiskReader(self._path(file_id))

    async def remove(self, file_id: FileId) -> None:
        with disk_errors("a file"):
            self._path(file_id).unlink(missing_ok=True)

    async def committed_before(self, age_s: float) -> list[FileId]:
        with disk_errors("files"):
            old = await asyncio.to_thread(self._older_than, age_s)
        return sorted(file_id for name in old if (file_id := parsed_file_id(name)) is not None)

    async def remove_abandoned(self, age_s: float) -> int:
        with disk_errors("abandoned uploads"):
            old = [name for name in await asyncio.to_thread(self._older_than, age_s) if name.endswith(_PARTIAL)]
            for name in old:
                (self._folder / name).unlink(missing_ok=True)
            return len(old)

    def _older_than(self, age_s: float) -> list[str]:
        before_s, old = time.time() - age_s, []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
                if entry.stat().st_mtime < before_s:
                    old.append(entry.name)
        return old

    def _path(self, file_id: FileId) -> Path:
        assert parsed_file_id(file_id) is not None, "a path from something that is no id"
        return self._folder / file_id


class _DiskWriter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(path.name + _PARTIAL)
        # Who is cancelled does not end the thread that writes, and another file may have the number of a closed one.
        self._lock = threading.Lock()
        with disk_errors("an upload"):
            self._file: int | None = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    async def write(self, chunk: bytes) -> None:
        assert self._file is not None, "a write after the end"
        with disk_errors("an upload"):
            await asyncio.to_thread(self._append, chunk)

    async def commit(self) -> None:
        with disk_errors("an upload"):
            await asyncio.to_thread(self._commit)

    async def discard(self) -> None:
        if self._file is not None:
            await asyncio.to_thread(self._discard)

    def _append(self, chunk: bytes) -> None:
        with self._lock:
            if self._file is not None:
                write_all(self._file, chunk)

    def _commit(self) -> None:
        with self._lock:
            assert self._file is not None, "a commit after the end"
            publish(self._file, self._partial, self._path)
            self._close()

    def _discard(self) -> None:
        with self._lock:
            if self._file is not None:
                self._close()
                self._partial.unlink(missing_ok=True)

    def _close(self) -> None:
        assert self._file is not None, "closed twice"
        file_descriptor, self._file = self._file, None
        os.close(file_descriptor)


class _DiskReader:
    def __init__(self, path: Path) -> None:
        try:
            with disk_errors("a file"):  # such as no more file descriptors: the content may be there
                self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise StorageDamaged(f"the content of {path.name} is not there") from error
            raise

    def read_at(self, offset: int, length: int) -> bytes:
        with disk_errors("a file"):
            return os.pread(self._file, length, offset)

    def close(self) -> None:
        os.close(self._file)
