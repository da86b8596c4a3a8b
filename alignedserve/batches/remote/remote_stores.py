"""Records, contents and result logs that are kept on the head, through its state server.

Serves the head's state to the gateways of all nodes: records, contents, results, counts of requests, and keys.

It runs beside the driver of batches, over a link of its own: a gateway that is not linked is not served, and every
other process is refused. What it serves is what gateways of the head read and write themselves."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Self

from alignedserve.batches.interfaces import BlobStore, BlobWriter, Page, RecordStore, ResultLogs
from alignedserve.batches.records import BatchKey, FileId, ResultKind, parsed_batch_key, parsed_file_id
from alignedserve.batches.remote.state_client import AnswerT, StateClient
from alignedserve.core.errors import ProtocolError, StorageError, StoreUnavailable
from alignedserve.keys.open_counts import OpenPool, OpenStatement, Wish
from alignedserve.keys.quotas import Charge, QuotaPool
from alignedserve.keys.watch import SharedKeys
from alignedserve.messages.handshake import Role
from alignedserve.messages.state import (
    MAX_CHUNK_BYTES,
    Answer,
    BeginUpload,
    Call,
    CallFailed,
    Change,
    ChunkRead,
    CommitChanges,
    Done,
    FinishUpload,
    KeysRead,
    OpenStated,
    PageRead,
    QuotaAnswer,
    ReadContent,
    ReadKeys,
    ReadPage,
    ReadResults,
    ReadValues,
    RemoveContent,
    RemoveResults,
    StateAnswer,
    StateCall,
    StateOpen,
    StateServerInbound,
    UseQuota,
    Values,
    WriteUpload,
)
from alignedserve.messages.wire import Codec, Message
from alignedserve.process.addresses import AddressBook
from alignedserve.process.background_tasks import start_background
from alignedserve.process.link_manager import LinkManager
from alignedserve.process.links import Identity, Peer

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


_MAX_CALLS = 256  # of one gateway at a time, and as many uploads
_MAX_REASON_LEN = 1000


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """What is counted here for all gateways."""

    quotas: QuotaPool
    open_requests: OpenPool

    @classmethod
    def beginning(cls, now: float) -> Self:
        """Return the counts of a state server that has just begun."""
        return cls(QuotaPool(), OpenPool(now))


@dataclass(slots=True)
class _Linked:
    gateway: str
    calls: set["asyncio.Task[None]"] = field(default_factory=set)  # under way
    uploads: dict[FileId, BlobWriter] = field(default_factory=dict)

    def upload(self, file_id: str) -> BlobWriter:
        upload = self.uploads.get(_file_id(file_id))
        if upload is None:
            raise StoreUnavailable("The upload is not known any more; send the file again.")
        return upload


class StateServer:
    """Answers calls from `start` to `close`."""

    def __init__(
        self,
        identity: Identity,
        book: AddressBook | None,
        *,
        records: RecordStore,
        blobs: BlobStore,
        logs: ResultLogs,
        unsaved: Mapping[str, bytes] | None = None,
        limits: SharedLimits | None = None,
        keys: SharedKeys | None = None,
    ) -> None:
        """`unsaved`: values by key that the driver could not store, shown instead of the stored values. `limits`: None:
        nothing is counted here. `keys`: None: none are shared."""
        self._identity = identity
        self._links = LinkManager(identity, Codec(StateServerInbound), self, book)
        self._records = records
        self._blobs = blobs
        self._logs = logs
        self._unsaved = {} if unsaved is None else unsaved
        self._limits = limits
        self._keys = keys or SharedKeys()
        self._linked: dict[str, _Linked] = {}  # by gateway

    async def start(self, address: str | None = None) -> None:
        """Listen where gateways look for its name, or at this address. Raises PeerError."""
        await self._links.listen(address or self._identity.name)

    async def close(self) -> None:
        """Close every link, and drop uploads that were not finished. May be repeated."""
        await self._links.close()
        for gateway in list(self._linked):
            await _forget(self._linked.pop(gateway))

    # --- LinkHandler

    def on_linked(self, peer: Peer) -> None:
        """Refuse what is no gateway."""
        if peer.role is not Role.GATEWAY:
            self._links.disconnect(peer.name)

    def on_lost(self, peer: Peer) -> None:
        """Drop the uploads of a gateway whose link is lost."""
        linked = self._linked.pop(peer.name, None)
        if linked is not None:
            start_background(_forget(linked), f"uploads of {peer.name}")

    def on_message(self, peer: Peer, message: Message) -> None:
        """Answer a call."""
        assert isinstance(message, StateCall), "a message of no union of this server"
        counted = self._counted(peer.name, message.call)
        if counted is not None:  # waits for nothing, and is not refused for calls that do
            self._links.send(peer.name, StateAnswer(message.call_id, counted))
            return
        linked = self._linked.setdefault(peer.name, _Linked(peer.name))
        if len(linked.calls) >= _MAX_CALLS:
            answer = CallFailed(StoreUnavailable.__name__, "too many calls at once")
            self._links.send(peer.name, StateAnswer(message.call_id, answer))
            return
        task = start_background(self._answer(linked, message), f"a call of {peer.name}")
        linked.calls.add(task)
        task.add_done_callback(linked.calls.discard)

    # --- calls

    async def _answer(self, linked: _Linked, message: StateCall) -> None:
        try:
            answer = await self._perform(message.call, linked)
        except (StorageError, ProtocolError) as error:
            answer = CallFailed(type(error).__name__, str(error)[:_MAX_REASON_LEN])
        # Another process of this name counts its calls anew: it must not get the answers of an earlier one.
        if self._linked.get(linked.gateway) is linked:
            self._links.send(linked.gateway, StateAnswer(message.call_id, answer))

    @singledispatchmethod
    async def _perform(self, call: Call, linked: _Linked) -> Answer:
        raise AssertionError(f"a call that is not served: {type(call).__name__}")

    @_perform.register
    async def _(self, call: ReadValues, linked: _Linked) -> Answer:
        values = await self._records.read(call.keys)
        return Values(tuple(self._unsaved.get(key, value) for key, value in zip(call.keys, values, strict=True)))

    @_perform.register
    async def _(self, call: CommitChanges, linked: _Linked) -> Answer:
        return Done(await self._records.commit(call.changes, unchanged=dict(call.unchanged)))

    @_perform.register
    async def _(self, call: ReadPage, linked: _Linked) -> Answer:
        page = await self._records.page(call.index, after=call.after, limit=call.limit, newest_first=call.newest_first)
        return PageRead(None) if page is None else PageRead(page.members, page.has_more)

    @_perform.register
    async def _(self, call: BeginUpload, linked: _Linked) -> Answer:
        file_id = _file_id(call.file_id)
        if len(linked.uploads) >= _MAX_CALLS:
            raise StoreUnavailable("Too many uploads at once; try again later.")
        if file_id in linked.uploads:
            raise ProtocolError("the upload was begun already")
        linked.uploads[file_id] = await self._blobs.begin(file_id)
        return Done()

    @_perform.register
    async def _(self, call: WriteUpload, linked: _Linked) -> Answer:
        await linked.upload(call.file_id).write(call.chunk)
        return Done()

    @_perform.register
    async def _(self, call: FinishUpload, linked: _Linked) -> Answer:
        upload = linked.upload(call.file_id)
        if call.is_committed:
            await upload.commit()
        else:
            await upload.discard()
        linked.uploads.pop(_file_id(call.file_id), None)
        return Done()

    @_perform.register
    async def _(self, call: ReadContent, linked: _Linked) -> Answer:
        reader = await self._blobs.open(_file_id(call.file_id))
        try:
            return ChunkRead(await asyncio.to_thread(reader.read_at, call.offset, call.length))
        finally:
            reader.close()

    @_perform.register
    async def _(self, call: RemoveContent, linked: _Linked) -> Answer:
        await self._blobs.remove(_file_id(call.file_id))
        return Done()

    @_perform.register
    async def _(self, call: ReadResults, linked: _Linked) -> Answer:
        kind = ResultKind.OUTPUT if call.is_output else ResultKind.ERROR
        async for chunk in self._logs.chunks(_batch_key(call.batch_id), kind, call.log_bytes, call.start):
            return ChunkRead(chunk[:MAX_CHUNK_BYTES])  # the next call is for the rest
        return ChunkRead(b"")

    @_perform.register
    async def _(self, call: RemoveResults, linked: _Linked) -> Answer:
        await self._logs.remove(_batch_key(call.batch_id))
        return Done()

    @_perform.register
    async def _(self, call: ReadKeys, linked: _Linked) -> Answer:
        version, content = self._keys.now
        chunk = b"" if version == call.known else content[call.start : call.start + MAX_CHUNK_BYTES]
        return KeysRead(version, len(content), chunk)

    def _counted(self, gateway: str, call: Call) -> Answer | None:
        if not isinstance(call, UseQuota | StateOpen):
            return None
        if self._limits is None:
            # So that the gateway counts by itself, against its own part of the limits.
            return CallFailed(ProtocolError.__name__, "a count of requests that is not kept here")
        now = time.monotonic()
        if isinstance(call, UseQuota):
            taken = self._limits.quotas.on_call(call.seen_s, tuple(Charge(*charge) for charge in call.charges), now)
            return QuotaAnswer(now, False) if taken is None else QuotaAnswer(now, True, taken.wait_s, taken.owed)
        wish = None if call.wish is None else Wish(*call.wish)
        statement = OpenStatement(gateway, call.process_id, call.number, call.num_open, call.is_whole, wish)
        return OpenStated(self._limits.open_requests.on_statement(statement, now))


async def _forget(linked: _Linked) -> None:
    await asyncio.gather(*linked.calls, return_exceptions=True)
    for file_id, upload in linked.uploads.items():
        try:
            await upload.discard()
        except StorageError:
            logger.exception("a part of %s is left to garbage collection", file_id)


def _batch_key(text: str) -> BatchKey:
    batch_id = parsed_batch_key(text)
    if batch_id is None:
        raise ProtocolError("the call does not name a batch id")
    return batch_id


def _file_id(text: str) -> FileId:
    file_id = parsed_file_id(text)
    if file_id is None:
        raise ProtocolError("the call does not name a file id")
    return file_id
