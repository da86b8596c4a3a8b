"""Records, contents and result logs that are kept on the head, through its state server."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence

from alignedserve.batches.interfaces import BlobWriter, Page
from alignedserve.batches.records import BatchKey, FileId, ResultKind
from alignedserve.batches.remote.state_client import AnswerT, StateClient
from alignedserve.core.errors import StorageError, StoreUnavailable
from alignedserve.messages.state import (
    MAX_CHUNK_BYTES,
    BeginUpload,
    Call,
    Change,
    ChunkRead,
    CommitChanges,
    Done,
    FinishUpload,
    PageRead,
    ReadContent,
    ReadPage,
    ReadResults,
    ReadValues,
    RemoveContent,
    RemoveResults,
    Values,
    WriteUpload,
)

logger = logging.getLogger(__name__)

_PART_BYTES = 256 * 1024  # of a content, in one call
_PARTS_AHEAD = 3  # of a download, read while one is sent on
_MAX_READS = 64  # of all downloads at a time: more calls are refused, and others need some too
_MAX_RECORD_CALLS = 128  # at a time; the others wait for their turn, so that none is refused
_TURN_S = 3.0  # for which they do: as long as for a server that is being restarted
_CONTENT_S = 30.0  # for a call that waits for a disk


class RemoteRecords:
    """Implements RecordStore."""

    def __init__(self, client: StateClient) -> None:
        self._client = client
        self._turns = asyncio.Semaphore(_MAX_RECORD_CALLS)

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """See RecordStore."""
        return list((await self._call(ReadValues(tuple(keys)), Values)).values) if keys else []

    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        """See RecordStore."""
        call = CommitChanges(tuple(changes), tuple(unchanged.items()))
        return (await self._call(call, Done)).is_done

    async def page(self, index: str, *, after: str | None, limit: int, newest_first: bool) -> Page | None:
        """See RecordStore."""
        found = await self._call(ReadPage(index, after, limit, newest_first), PageRead)
        return None if found.members is None else Page(found.members, found.has_more)

    async def close(self) -> None:
        """See RecordStore: the link belongs to the client's owner."""

    async def _call(self, call: Call, kind: type[AnswerT]) -> AnswerT:
        try:
            async with asyncio.timeout(_TURN_S):
                await self._turns.acquire()
        except TimeoutError as error:
            raise StoreUnavailable("Too many calls wait for the head, which keeps files and batches.") from error
        try:
            return await self._client.call(call, kind)
        finally:
            self._turns.release()


class RemoteBlobs:
    """Implements ContentStore."""

    def __init__(self, client: StateClient) -> None:
        self._client = client
        self._reads = asyncio.Semaphore(_MAX_READS)

    async def begin(self, file_id: FileId) -> BlobWriter:
        """See ContentStore."""
        await self._client.call(BeginUpload(file_id), Done, _CONTENT_S)
        return _RemoteWriter(self._client, file_id)

    async def chunks(self, file_id: FileId, start: int = 0) -> AsyncIterator[bytes]:
        """See ContentStore."""
        under_way: deque[asyncio.Task[bytes]] = deque()
        offset = start  # of the part that is next
        try:
            while part := await (under_way.popleft() if under_way else self._read(file_id, offset)):
                offset += len(part)
                if len(part) == _PART_BYTES:
                    missing = range(len(under_way), _PARTS_AHEAD)
                    under_way += [self._begin_read(file_id, offset + place * _PART_BYTES) for place in missing]
                else:  # the end, most likely
                    await _drop(under_way)
                yield part
        finally:
            await _drop(under_way)

    def _begin_read(self, file_id: FileId, offset: int) -> asyncio.Task[bytes]:
        return asyncio.create_task(self._read(file_id, offset))

    async def _read(self, file_id: FileId, offset: int) -> bytes:
        async with self._reads:
            return (await self._client.call(ReadContent(file_id, offset, _PART_BYTES), ChunkRead, _CONTENT_S)).chunk

    async def remove(self, file_id: FileId) -> None:
        """See ContentStore."""
        await self._client.call(RemoveContent(file_id), Done, _CONTENT_S)


class RemoteLogs:
    """Implements ResultLogs."""

    def __init__(self, client: StateClient) -> None:
        self._client = client

    async def chunks(
        self, batch_id: BatchKey, kind: ResultKind, log_bytes: int, start: int = 0
    ) -> AsyncIterator[bytes]:
        """See ResultLogs."""
        offset, is_output = start, kind is ResultKind.OUTPUT
        while True:
            call = ReadResults(batch_id, is_output, log_bytes, offset)
            chunk = (await self._client.call(call, ChunkRead, _CONTENT_S)).chunk
            if not chunk:
                return
            yield chunk
            offset += len(chunk)

    async def remove(self, batch_id: BatchKey) -> None:
        """See ResultLogs."""
        await self._client.call(RemoveResults(batch_id), Done, _CONTENT_S)


class _RemoteWriter:
    def __init__(self, client: StateClient, file_id: FileId) -> None:
        self._client = client
        self._file_id = file_id
        self._pending = bytearray()
        self._is_over = False

    async def write(self, chunk: bytes) -> None:
        """See BlobWriter."""
        self._pending += chunk
        if len(self._pending) >= _PART_BYTES:
            await self._flush()

    async def commit(self) -> None:
        """See BlobWriter."""
        await self._flush()
        await self._client.call(FinishUpload(self._file_id, is_committed=True), Done, _CONTENT_S)
        self._is_over = True

    async def discard(self) -> None:
        """See BlobWriter."""
        if self._is_over:
            return
        self._is_over = True
        try:
            await self._client.call(FinishUpload(self._file_id, is_committed=False), Done, _CONTENT_S)
        except StorageError as error:  # the server drops it with the link
            logger.info("%s is not dropped at once: %s", self._file_id, error)

    async def _flush(self) -> None:
        while self._pending:
            part = bytes(self._pending[:MAX_CHUNK_BYTES])
            await self._client.call(WriteUpload(self._file_id, part), Done, _CONTENT_S)
            del self._pending[: len(part)]


async def _drop(reads: deque[asyncio.Task[bytes]]) -> None:
    """Cancel reads that are no longer needed, and ignore their results and errors."""
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    reads.clear()
