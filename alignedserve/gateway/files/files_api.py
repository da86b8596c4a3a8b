"""What a gateway does with files and batches on behalf of one key. Another key's are not there."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec

from alignedserve.batches.eta import quote, workload
from alignedserve.batches.housekeeping import forget_file, uses
from alignedserve.batches.location import BatchStores
from alignedserve.batches.logic import CancelAsked, advance
from alignedserve.batches.records import (
    NUM_ID_BYTES,
    BatchKey,
    BatchRecord,
    FileId,
    FileRecord,
    Progress,
    Quote,
    batch_key_of,
    file_id_of,
    parsed_batch_key,
    parsed_file_id,
)
from alignedserve.batches.repository import BatchRepository, BatchSnapshot, StorageUsage, idempotency_key_of
from alignedserve.batches.result_files import num_bytes_of
from alignedserve.config.sections import BatchesConfig
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.errors import Conflict, NotFound, QuotaExceeded
from alignedserve.gateway.files.schemas import CreateBatchRequest, endpoint_of, lifetime_of, window_s
from alignedserve.gateway.files.uploads import Upload

INPUT_PURPOSE = "batch"
_QUOTA_RETRY_S = 60.0
_AGAIN_S = 24 * 3600.0  # for how long an Idempotency-Key is remembered, at least
_RACES = 5


class Content(NamedTuple):
    """What a file holds."""

    num_bytes: int
    start_at: Callable[[int], AsyncIterator[bytes]]  # from a byte on; raises StorageDamaged where they are not there


@dataclass(frozen=True, slots=True)
class FilesApi:
    """Every method raises StoreUnavailable while the state cannot be reached."""

    stores: BatchStores
    config: BatchesConfig

    @property
    def book(self) -> BatchRepository:
        """Files and batches."""
        return self.stores.book

    # --- files

    async def keep(self, owner: str, file_id: FileId, upload: Upload) -> FileRecord:
        """Take in an upload whose bytes have come. Raises InvalidRequest, QuotaExceeded, StorageFull."""
        now = time.time()
        purpose = upload.fields.get("purpose")
        if purpose != INPUT_PURPOSE:
            raise InvalidRequest("purpose must be 'batch'.", param="purpose", code="invalid_value")
        if upload.num_bytes == 0:
            raise InvalidRequest("The file is empty.", param="file", code="empty_file")
        record = FileRecord(
            file_id=file_id,
            owner=owner,
            name=upload.name,
            purpose=INPUT_PURPOSE,
            num_bytes=upload.num_bytes,
            num_lines=upload.num_lines,
            digest=upload.digest,
            created_s=now,
            expires_s=now + (lifetime_of(upload.fields) or self.config.file_lifetime_s),
        )
        await upload.blob.commit()
        # When the store does not say whether it has the record, the content stays: `tidy` removes it if it has not.
        if not await self.book.add_file(record, fits=self._fits):
            await self.stores.blobs.remove(file_id)
            raise QuotaExceeded("This key has too many files; delete some.", retry_after_s=_QUOTA_RETRY_S)
        return record

    def _fits(self, stock: StorageUsage) -> bool:
        return stock.num_files <= self.config.max_files and stock.num_bytes <= self.config.max_files_bytes

    async def file(self, owner: str, text: str) -> FileRecord:
        """Raises NotFound."""
        file_id = parsed_file_id(text)
        record = await self.book.file(owner, file_id, time.time()) if file_id is not None else None
        if record is None:
            raise NotFound("No such file.", param="id")
        return record

    async def num_bytes(self, record: FileRecord) -> int:
        """The file's size, which grows while its batch runs."""
        if record.view is None:
            return record.num_bytes
        sight = await self.book.batch(record.view.batch_id)
        return record.num_bytes if sight is None else num_bytes_of(sight.progress, record.view.kind)

    async def content(self, record: FileRecord) -> Content:
        """The file's bytes; of a result file those that are there now."""
        if record.view is None:
            return Content(record.num_bytes, partial(self.stores.blobs.chunks, record.file_id))
        batch_id, kind = record.view.batch_id, record.view.kind
        sight = await self.book.batch(batch_id)
        progress = Progress() if sight is None else sight.progress
        lines = partial(self.stores.logs.lines, batch_id, kind, progress.log_bytes)
        return Content(num_bytes_of(progress, kind), lambda start: _in_threads(lines(start)))

    async def files(
        self, owner: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> tuple[list[FileRecord], bool]:
        """A page of files, and whether there are more. Raises InvalidRequest for an unknown cursor."""
        kept: list[FileRecord] = []
        while True:
            found = await self.book.files(owner, after=after, limit=limit, newest_first=newest_first)
            if found is None:
                raise InvalidRequest("after is not the id of a file in this list.", param="after")
            kept += [record for record in found[:limit] if purpose in (None, record.purpose)]
            # A page that was thinned out goes on: SDKs take an empty page for the last one.
            if len(kept) > limit or len(found) <= limit:
                return kept[:limit], len(kept) > limit or len(found) > limit
            if purpose is None:
                return kept, True
            after = found[limit - 1].file_id

    async def remove(self, owner: str, text: str) -> FileRecord:
        """Delete a file. Raises NotFound, or Conflict while a batch needs it."""
        for _ in range(_RACES):
            record = await self.file(owner, text)
            for sight in await self.book.active_batches():
                if uses(sight.record, record):
                    raise Conflict(f"{sight.record.batch_id} is using this file.", param="id", code="file_in_use")
            if await forget_file(self.stores, record):
                return record
        raise Conflict("The file is being changed; try again.", param="id")

    # --- batches

    async def create(self, owner: str, asked: CreateBatchRequest, again: str | None) -> BatchSnapshot:
        """A new batch, or the one that this `again` (an Idempotency-Key) made before."""
        endpoint, window = endpoint_of(asked.endpoint), window_s(asked.completion_window)
        fingerprint = _fingerprint(asked)
        key = None if again is None else idempotency_key_of(owner, hashlib.sha256(again.encode()).hexdigest())
        for _ in range(_RACES):
            made = await self._made_before(key)
            if made is not None:
                return await self._the_same(made, asked, fingerprint)
            source = await self._source(owner, asked.input_file_id)
            active = await self.book.active_batches()
            self._check_quota(owner, active)
            now = time.time()
            record = BatchRecord(
                batch_id=batch_key_of(secrets.token_bytes(NUM_ID_BYTES)),
                owner=owner,
                endpoint=endpoint,
                input_file_id=source.file_id,
                output_file_id=file_id_of(secrets.token_bytes(NUM_ID_BYTES)),
                error_file_id=file_id_of(secrets.token_bytes(NUM_ID_BYTES)),
                completion_window=asked.completion_window,
                created_s=now,
                expires_s=now + window,
                output_lifetime_s=asked.output_expires_after.seconds if asked.output_expires_after else None,
                metadata=asked.metadata,
                input_bytes=source.num_bytes,
                input_lines=source.num_lines,
                fingerprint=fingerprint,
            )
            sight = BatchSnapshot(record, Progress(quote=await self._quoted(record, active, now)))
            if await self.book.add_batch(sight, source, again=key, again_s=max(_AGAIN_S, window)):
                return sight
        raise Conflict("The file is being changed; try again.", param="input_file_id")

    async def _made_before(self, key: str | None) -> BatchSnapshot | None:
        batch_id = await self.book.made_before(key) if key is not None else None
        return await self.book.batch(batch_id) if batch_id is not None else None

    async def _the_same(self, made: BatchSnapshot, asked: CreateBatchRequest, fingerprint: str) -> BatchSnapshot:
        """The batch, if this is the request that made it: whoever sends it again may have sent its file again."""
        if made.record.fingerprint == fingerprint:
            if made.record.input_file_id == asked.input_file_id:
                return made
            first = await self.book.file(made.record.owner, made.record.input_file_id, time.time())
            again = await self._source(made.record.owner, asked.input_file_id)
            if first is not None and first.digest and first.digest == again.digest:
                return made
        raise Conflict(
            "This Idempotency-Key was used for another request.",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )

    async def _source(self, owner: str, text: str) -> FileRecord:
        file_id = parsed_file_id(text)
        record = await self.book.file(owner, file_id, time.time()) if file_id is not None else None
        if record is None:
            raise NotFound("No such file: input_file_id.", param="input_file_id")
        if record.purpose != INPUT_PURPOSE:
            raise InvalidRequest("The file's purpose must be 'batch'.", param="input_file_id", code="invalid_value")
        return record

    def _check_quota(self, owner: str, active: list[BatchSnapshot]) -> None:
        num_own = sum(sight.record.owner == owner for sight in active)
        if num_own >= self.config.max_active:
            message = f"This key has {num_own} batches that are not over."
            raise QuotaExceeded(message, retry_after_s=_QUOTA_RETRY_S)

    async def _quoted(self, record: BatchRecord, active: list[BatchSnapshot], now: float) -> Quote:
        """What is expected of a batch that has only just come, from the size of its file."""
        capacity = await self.book.capacity(self.config.assumed_tokens_per_s)
        others = [workload(sight.record, sight.progress, capacity) for sight in active]
        return quote(workload(record, Progress(), capacity), others, capacity, now)

    async def batch(self, owner: str, text: str) -> BatchSnapshot:
        """Raises NotFound."""
        batch_id = parsed_batch_key(text)
        sight = await self.book.batch(batch_id) if batch_id is not None else None
        if sight is None or sight.record.owner != owner:
            raise NotFound("No such batch.", param="batch_id")
        return sight

    async def batches(self, owner: str, *, after: str | None, limit: int) -> tuple[list[BatchSnapshot], bool]:
        """A page of batches, newest first, and whether there are more."""
        found = await self.book.list_batches(owner, after=after, limit=limit)
        if found is None:
            raise InvalidRequest("after is not the id of a batch in this list.", param="after")
        return found

    async def cancel(self, owner: str, text: str) -> BatchSnapshot:
        """Ask for the end of a batch. One that is over stays as it is, and cancelling twice changes nothing."""
        sight = await self.batch(owner, text)
        batch_id: BatchKey = sight.record.batch_id
        if sight.record.is_over:
            message = f"The batch is {sight.record.status.value}; it can no longer be cancelled."
            raise Conflict(message, param="batch_id", code="batch_is_over")
        record = await self.book.change_batch(batch_id, lambda one: advance(one, CancelAsked(), time.time()))
        return BatchSnapshot(record, sight.progress)


def new_file_id() -> FileId:
    """An id that nobody can guess."""
    return file_id_of(secrets.token_bytes(NUM_ID_BYTES))


async def _in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Each chunk is as much of a log as holds it, perhaps all of it."""
    while chunk := await asyncio.to_thread(next, chunks, b""):
        yield chunk


def _fingerprint(asked: CreateBatchRequest) -> str:
    fields = asked.model_dump(exclude={"input_file_id"})
    return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()
