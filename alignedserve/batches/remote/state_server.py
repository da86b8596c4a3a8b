"""Serves what is kept on the head to the gateways of all nodes: records, contents, results, and counts of requests.

It runs beside the driver of batches, over a link of its own: a gateway that is not linked is not served, and every
other process is refused. What it serves is what gateways of the head read and write themselves.
"""

import asyncio
import logging
import time
from functools import singledispatchmethod

from alignedserve.batches.interfaces import BlobStore, BlobWriter, RecordStore, ResultLogs
from alignedserve.batches.records import BatchKey, FileId, ResultKind, parsed_batch_key, parsed_file_id
from alignedserve.core.errors import ProtocolError, StorageError, StoreUnavailable
from alignedserve.core.quotas import QuotaCall, QuotaPool
from alignedserve.messages.handshake import Role
from alignedserve.messages.state import (
    MAX_CHUNK_BYTES,
    Answer,
    BeginUpload,
    Call,
    CallFailed,
    ChunkRead,
    CommitChanges,
    Done,
    FinishUpload,
    PageRead,
    QuotaAnswer,
    ReadContent,
    ReadPage,
    ReadResults,
    ReadValues,
    RemoveContent,
    RemoveResults,
    StateAnswer,
    StateCall,
    StateServerInbound,
    UseQuota,
    Values,
    WriteUpload,
)
from alignedserve.messages.wire import Codec, Message
from alignedserve.runtime.process.addresses import AddressBook
from alignedserve.runtime.process.background_tasks import start_background
from alignedserve.runtime.process.link_manager import LinkManager
from alignedserve.runtime.process.links import Identity, Peer

logger = logging.getLogger(__name__)

_MAX_CALLS = 256  # of one gateway at a time, and as many uploads
_MAX_REASON_LEN = 1000


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
        quotas: QuotaPool | None = None,
    ) -> None:
        """`quotas`: None: requests are not limited."""
        self._identity = identity
        self._links = LinkManager(identity, Codec(StateServerInbound), self, book)
        self._records = records
        self._blobs = blobs
        self._logs = logs
        self._quotas = quotas
        self._calls: dict[str, set[asyncio.Task[None]]] = {}  # under way, by gateway
        self._uploads: dict[tuple[str, FileId], BlobWriter] = {}

    async def start(self, address: str | None = None) -> None:
        """Listen where gateways look for its name, or at this address. Raises PeerError."""
        await self._links.listen(address or self._identity.name)

    async def close(self) -> None:
        """Close every link, and drop uploads that were not finished. May be repeated."""
        await self._links.close()
        for gateway in list(self._calls):
            await self._forget(gateway)

    # --- LinkHandler

    def on_linked(self, peer: Peer) -> None:
        """Refuse what is no gateway."""
        if peer.role is not Role.GATEWAY:
            self._links.disconnect(peer.name)

    def on_lost(self, peer: Peer) -> None:
        """Drop the uploads of a gateway whose link is lost."""
        if peer.name in self._calls:
            start_background(self._forget(peer.name), f"uploads of {peer.name}")

    def on_message(self, peer: Peer, message: Message) -> None:
        """Answer a call."""
        assert isinstance(message, StateCall), "a message of no union of this server"
        calls = self._calls.setdefault(peer.name, set())
        if len(calls) >= _MAX_CALLS:
            self._send(peer, message.call_id, CallFailed("StoreUnavailable", "too many calls at once"))
            return
        task = start_background(self._answer(peer, message), f"a call of {peer.name}")
        calls.add(task)
        task.add_done_callback(calls.discard)

    # --- calls

    async def _answer(self, peer: Peer, message: StateCall) -> None:
        try:
            answer = await self._perform(message.call, peer.name)
        except (StorageError, ProtocolError) as error:
            answer = CallFailed(type(error).__name__, str(error)[:_MAX_REASON_LEN])
        self._send(peer, message.call_id, answer)

    def _send(self, peer: Peer, call_id: int, answer: Answer) -> None:
        self._links.send(peer.name, StateAnswer(call_id, answer))

    @singledispatchmethod
    async def _perform(self, call: Call, gateway: str) -> Answer:
        raise AssertionError(f"a call that is not served: {type(call).__name__}")

    @_perform.register
    async def _(self, call: ReadValues, gateway: str) -> Answer:
        return Values(tuple(await self._records.read(call.keys)))

    @_perform.register
    async def _(self, call: CommitChanges, gateway: str) -> Answer:
        return Done(await self._records.commit(call.changes, unchanged=dict(call.unchanged)))

    @_perform.register
    async def _(self, call: ReadPage, gateway: str) -> Answer:
        page = await self._records.page(call.index, after=call.after, limit=call.limit, newest_first=call.newest_first)
        return PageRead(None) if page is None else PageRead(page.members, page.has_more)

    @_perform.register
    async def _(self, call: BeginUpload, gateway: str) -> Answer:
        key = gateway, _file_id(call.file_id)
        if sum(one == gateway for one, _ in self._uploads) >= _MAX_CALLS:
            raise StoreUnavailable("too many uploads at once")
        if key in self._uploads:
            raise ProtocolError("an upload that was begun already")
        self._uploads[key] = await self._blobs.begin(key[1])
        return Done()

    @_perform.register
    async def _(self, call: WriteUpload, gateway: str) -> Answer:
        await self._upload(gateway, call.file_id).write(call.chunk)
        return Done()

    @_perform.register
    async def _(self, call: FinishUpload, gateway: str) -> Answer:
        upload = self._upload(gateway, call.file_id)
        if call.is_committed:
            await upload.commit()
        else:
            await upload.discard()
        self._uploads.pop((gateway, _file_id(call.file_id)), None)
        return Done()

    @_perform.register
    async def _(self, call: ReadContent, gateway: str) -> Answer:
        reader = await self._blobs.open(_file_id(call.file_id))
        try:
            return ChunkRead(await asyncio.to_thread(reader.read_at, call.offset, call.length))
        finally:
            reader.close()

    @_perform.register
    async def _(self, call: RemoveContent, gateway: str) -> Answer:
        await self._blobs.remove(_file_id(call.file_id))
        return Done()

    @_perform.register
    async def _(self, call: ReadResults, gateway: str) -> Answer:
        kind = ResultKind.OUTPUT if call.is_output else ResultKind.ERROR
        async for chunk in self._logs.chunks(_batch_key(call.batch_id), kind, call.log_bytes, call.start):
            return ChunkRead(chunk[:MAX_CHUNK_BYTES])  # the next call is for the rest
        return ChunkRead(b"")

    @_perform.register
    async def _(self, call: RemoveResults, gateway: str) -> Answer:
        await self._logs.remove(_batch_key(call.batch_id))
        return Done()

    @_perform.register
    async def _(self, call: UseQuota, gateway: str) -> Answer:
        now = time.monotonic()
        if self._quotas is None:
            return QuotaAnswer(now, is_member=False, wait_s=0.0)
        wait_s = self._quotas.on_call(
            QuotaCall(gateway, call.process_id, call.seen_s, call.spent, call.key_number), now
        )
        return QuotaAnswer(now, self._quotas.is_member(gateway), wait_s)

    def _upload(self, gateway: str, file_id: str) -> BlobWriter:
        upload = self._uploads.get((gateway, _file_id(file_id)))
        if upload is None:
            raise StoreUnavailable("an upload that is not known any more")
        return upload

    async def _forget(self, gateway: str) -> None:
        """Drop a gateway's uploads, after the calls that use them."""
        await asyncio.gather(*self._calls.pop(gateway, ()), return_exceptions=True)
        for key in [key for key in self._uploads if key[0] == gateway]:
            try:
                await self._uploads.pop(key).discard()
            except StorageError:
                logger.exception("a part of %s is left to garbage collection", key[1])


def _file_id(text: str) -> FileId:
    file_id = parsed_file_id(text)
    if file_id is None:
        raise ProtocolError("a call for something that is no file id")
    return file_id


def _batch_key(text: str) -> BatchKey:
    batch_id = parsed_batch_key(text)
    if batch_id is None:
        raise ProtocolError("a call for something that is no batch id")
    return batch_id
