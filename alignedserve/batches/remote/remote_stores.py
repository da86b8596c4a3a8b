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
# Calls at a time, by what they are about. The server takes 256 of a gateway, and keys and others need some too.
_MAX_OF_RECORDS, _MAX_DOWNLOADS, _MAX_UPLOADS, _MAX_OF_RESULTS = 128, 64, 32, 16
_RECORDS_S, _RECORDS_TURN_S = 5.0, 3.0  # for a call, and for its turn: as long as for a server that is being restarted
_CONTENT_S = 30.0  # for a call that waits for a disk, and for its turn


class _Turns:
    def __init__(self, client: StateClient, most: int, timeout_s: float, turn_s: float) -> None:
        self._client = client
        self._free = asyncio.Semaphore(most)
        self._timeout_s = timeout_s
        self._turn_s = turn_s

    async def call(self, call: Call, kind: type[AnswerT]) -> AnswerT:
        try:
            async with asyncio.timeout(self._turn_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise StoreUnavailable("Too many calls wait for the head, which keeps files and batches.") from error
        try:
            return await self._client.call(call, kind, self._timeout_s)
        finally:
            self._free.release()


class RemoteRecords:
    """Implements RecordStore."""

    def __init__(self, client: StateClient) -> None:
        self._turns = _Turns(client, _MAX_OF_RECORDS, _RECORDS_S, _RECORDS_TURN_S)

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        return list((await self._turns.call(ReadValues(tuple(keys)), Values)).values) if keys else []

    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        call = CommitChanges(tuple(changes), tuple(unchanged.items()))
        return (await self._turns.call(call, Done)).is_done

    async def page(self, index: str, *, after: str | None, limit: int, newest_first: bool) -> Page | None:
        page = await self._turns.call(ReadPage(index, after, limit, newest_first), PageRead)
        return None if page.members is None else Page(page.members, page.has_more)

    async def close(self) -> None:
        """See RecordStore: the link belongs to the client's owner."""


class RemoteBlobs:
    """Implements ContentStore."""

    def __init__(self, client: StateClient) -> None:
        self._downloads = _Turns(client, _MAX_DOWNLOADS, _CONTENT_S, _CONTENT_S)
        self._uploads = _Turns(client, _MAX_UPLOADS, _CONTENT_S, _CONTENT_S)

    async def begin(self, file_id: FileId) -> BlobWriter:
        await self._uploads.call(BeginUpload(file_id), Done)
        return _RemoteWriter(self._uploads, file_id)

    async def chunks(self, file_id: FileId, start: int = 0) -> AsyncIterator[bytes]:
        under_way: deque[asyncio.Task[bytes]] = deque()
        offset = start  # of the part that is next
        try:
            while part := await (under_way.popleft() if under_way else self._read(file_id, offset)):
                offset += len(part)
                if len(part) == _PART_BYTES:
                    missing = range(len(under_way), _PARTS_AHEAD)
                    under_way += [self._begin_read(file_id, offset + index * _PART_BYTES) for index in missing]
                else:  # the end, most likely
                    await _drop(under_way)
                yield part
        finally:
            await _drop(under_way)

    def _begin_read(self, file_id: FileId, offset: int) -> asyncio.Task[bytes]:
        return asyncio.create_task(self._read(file_id, offset))

    async def _read(self, file_id: FileId, offset: int) -> bytes:
        return (await self._downloads.call(ReadContent(file_id, offset, _PART_BYTES), ChunkRead)).chunk

    async def remove(self, file_id: FileId) -> None:
        await self._uploads.call(RemoveContent(file_id), Done)


class RemoteLogs:
    """Implements ResultLogs."""

    def __init__(self, client: StateClient) -> None:
        self._turns = _Turns(client, _MAX_OF_RESULTS, _CONTENT_S, _CONTENT_S)

    async def chunks(
        self, batch_id: BatchKey, kind: ResultKind, log_bytes: int, start: int = 0
    ) -> AsyncIterator[bytes]:
        offset, is_output = start, kind is ResultKind.OUTPUT
        while True:
            call = ReadResults(batch_id, is_output, log_bytes, offset)
            chunk = (await self._turns.call(call, ChunkRead)).chunk
            if not chunk:
                return
            yield chunk
            offset += len(chunk)

    async def remove(self, batch_id: BatchKey) -> None:
        await self._turns.call(RemoveResults(batch_id), Done)


class _RemoteWriter:
    def __init__(self, turns: _Turns, file_id: FileId) -> None:
        self._turns = turns
        self._file_id = file_id
        self._pending = bytearray()
        self._is_over = False

    async def write(self, chunk: bytes) -> None:
        self._pending += chunk
        if len(self._pending) >= _PART_BYTES:
            await self._flush()

    async def commit(self) -> None:
        await self._flush()
        await self._turns.call(FinishUpload(self._file_id, is_committed=True), Done)
        self._is_over = True

    async def discard(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        try:
            await self._turns.call(FinishUpload(self._file_id, is_committed=False), Done)
        except StorageError as error:  # the server drops it with the link
            logger.info("%s is not dropped at once: %s", self._file_id, error)

    async def _flush(self) -> None:
        while self._pending:
            part = bytes(self._pending[:MAX_CHUNK_BYTES])
            await self._turns.call(WriteUpload(self._file_id, part), Done)
            del self._pending[: len(part)]


async def _drop(reads: deque[asyncio.Task[bytes]]) -> None:
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    reads.clear()
