"""The Files and Batches API on behalf of one owner (an API key); files and batches of others do not exist for it."""

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import orjson

from alignedserve.api.errors import Conflict, Forbidden, NotFound, QuotaExceeded, ResourceUnavailable
from alignedserve.api.openai.request_builder import check_priority
from alignedserve.batches.driver import delete_file, is_used_by
from alignedserve.batches.eta import Throughputs, estimate_eta, remaining_work
from alignedserve.batches.hours import Schedule, check_window
from alignedserve.batches.location import BatchStores
from alignedserve.batches.logic import CancelRequested, PauseRequested, ResumeRequested, advance
from alignedserve.batches.records import (
    NUM_ID_BYTES,
    BatchKey,
    BatchRecord,
    BatchTotals,
    Endpoint,
    Eta,
    FileId,
    FileRecord,
    Progress,
    batch_key_of,
    client_of,
    file_id_of,
    parsed_batch_key,
    parsed_file_id,
)
from alignedserve.batches.repository import MAX_ACTIVE, BatchRepository, BatchSnapshot, idempotency_key_of
from alignedserve.batches.results import result_bytes
from alignedserve.config.sections import BatchesConfig
from alignedserve.core.errors import InvalidRequest, StorageError, StoreUnavailable
from alignedserve.gateway.files.lists import list_batches
from alignedserve.gateway.files.schemas import (
    CreateBatchRequest,
    ExpiresAfter,
    endpoint_of,
    lifetime_of,
    schedule_asked,
    window_s,
)
from alignedserve.gateway.files.uploads import ArrivingUploads, Upload, too_many_files
from alignedserve.keys.entry import FLEX, KeyEntry, Limit
from alignedserve.keys.ring import CurrentKeys
from alignedserve.process.background_tasks import PatientReader

_LONG_S = 0.5  # what fails sooner holds up nobody: others of many gateways were in its way
_PATIENCE_S = 1.0  # of a scrape, for which deploy/prometheus gives five seconds in all
INPUT_PURPOSE = "batch"
_QUOTA_RETRY_S = 60.0
_IDEMPOTENCY_KEY_LIFETIME_S = 24 * 3600.0  # an Idempotency-Key is remembered for at least this long
_MAX_CONFLICTS = 5
WINDOW = "24h"


class _Owner:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_given_up = 0  # changes that the store did not answer to


class Turns:
    """The changes of this process that wait, by their owners; other processes' are seen by the store alone."""

    def __init__(self) -> None:
        self._owners: WeakValueDictionary[str, _Owner] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Let one change of this owner be made. Raises StoreUnavailable if the store did not answer to one before it:
        all waiting changes fail together, not each after seconds.
        """
        owner = self._owners.setdefault(name, _Owner())
        num_given_up = owner.num_given_up
        async with owner.lock:
            if owner.num_given_up != num_given_up:
                raise StoreUnavailable("Files and batches cannot be reached now.")
            began_s = time.monotonic()
            try:
                yield
            except StoreUnavailable:
                owner.num_given_up += time.monotonic() - began_s >= _LONG_S
                raise


class BatchTotalsReader:
    """Reads the totals of a repository, whose state may not answer."""

    def __init__(self) -> None:
        self._reader: PatientReader[BatchTotals | None] = PatientReader(_PATIENCE_S)

    async def read(self, repository: BatchRepository) -> BatchTotals | None:
        """Return the totals; None while the state cannot be reached, or does not answer at once."""
        return await self._reader.read(lambda: asyncio.create_task(_read(repository)))


async def _read(repository: BatchRepository) -> BatchTotals | None:
    try:
        return await repository.totals()
    except StorageError:
        return None


class Content(NamedTuple):
    """Content of a file."""

    num_bytes: int
    start_at: Callable[[int], AsyncIterator[bytes]]  # from a byte on; raises StorageDamaged for missing bytes


@dataclass(frozen=True, slots=True)
class FilesApi:
    """Operations on files and batches. Every method raises StoreUnavailable while the store is down."""

    stores: BatchStores
    config: BatchesConfig
    keys: CurrentKeys = field(default_factory=CurrentKeys)  # whose limits hold
    totals: BatchTotalsReader = field(default_factory=BatchTotalsReader)
    # Of clients that create batches: one at a time here; those of other gateways are seen by `last_created`.
    _creating: Turns = field(default_factory=Turns)
    # Of owners whose files are added or deleted: one change at a time here, as each changes the sum of what they store.
    _changing: Turns = field(default_factory=Turns)
    _arriving: ArrivingUploads = field(default_factory=ArrivingUploads)

    @property
    def repository(self) -> BatchRepository:
        return self.stores.repository

    # --- files

    @contextlib.asynccontextmanager
    async def arriving(self, owner: str) -> AsyncIterator[Callable[[int], None]]:
        stored = await self.repository.stored_by(owner)
        if stored.num_files >= self.config.max_files:
            raise too_many_files()
        with self._arriving.counted(owner, self.config.max_files_bytes - stored.num_bytes) as take:
            yield take

    async def add_file(self, owner: str, file_id: FileId, upload: Upload) -> FileRecord:
        """Commit a received upload as a file. Raises InvalidRequest, QuotaExceeded, StorageFull."""
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
        # If it is not known whether the store has the record, the content stays: garbage collection removes it if not.
        async with self._changing.turn(owner):
            is_added = await self.repository.add_file(
                record,
                fits=lambda usage: (
                    usage.num_files <= self.config.max_files and usage.num_bytes <= self.config.max_files_bytes
                ),
            )
        if not is_added:
            await self.stores.blobs.remove(file_id)
            raise too_many_files()
        return record

    async def file(self, owner: str, text: str) -> FileRecord:
        record = await self._find_file(owner, text)
        if record is None:
            raise NotFound("No such file.", param="id")
        return record

    async def _find_file(self, owner: str, text: str) -> FileRecord | None:
        file_id = parsed_file_id(text)
        return None if file_id is None else await self.repository.file(owner, file_id, time.time())

    async def content(self, record: FileRecord) -> Content:
        """Return the file's content; of a result file, the results so far."""
        if record.view is None:
            return Content(record.num_bytes, partial(self.stores.blobs.chunks, record.file_id))
        batch_id, kind = record.view.batch_id, record.view.kind
        snapshot = await self.repository.batch(batch_id)
        progress = Progress() if snapshot is None else snapshot.progress
        return Content(
            result_bytes(progress, kind), partial(self.stores.logs.chunks, batch_id, kind, progress.log_bytes)
        )

    async def remove(self, owner: str, text: str) -> FileRecord:
        """Delete a file. Raises NotFound, or Conflict while a batch uses it."""
        async with self._changing.turn(owner):
            for _ in range(_MAX_CONFLICTS):
                record = await self.file(owner, text)
                for batch in await self.repository.active_batches():
                    if is_used_by(record, batch.record):
                        raise Conflict(f"{batch.record.batch_id} is using this file.", param="id", code="file_in_use")
                if await delete_file(self.stores, record):
                    return record
        raise Conflict("The file is being changed; try again.", param="id")

    # --- batches

    async def create(self, owner: str, request: CreateBatchRequest, idempotency_key: str | None) -> BatchSnapshot:
        """Create a batch, or return the one that was created with this Idempotency-Key before."""
        endpoint, window = endpoint_of(request.endpoint), window_s(request.completion_window)
        schedule = schedule_asked(request)
        client = _batches_key(self.keys, owner, request)
        fingerprint = _fingerprint(request)
        key = None if idempotency_key is None else idempotency_key_of(owner, idempotency_key)
        async with self._creating.turn(client_of(owner)):
            for _ in range(_MAX_CONFLICTS):
                made = None if key is None else await self.repository.batch_with_key(key)
                if made is not None:
                    return await self._check_same_request(made, request, fingerprint)
                source = await self._source(owner, request.input_file_id)
                last_created = await self.repository.last_created(client_of(owner))
                active = await self.repository.active_batches()
                self._check_quota(owner, active)
                now = time.time()
                check_window(schedule, now, now + window)
                record = _new_record(request, source, endpoint, schedule, now, now + window, fingerprint)
                throughputs = await self.repository.throughputs(self.config.assumed_tokens_per_s)
                _check_tokens(client, record, active, throughputs)
                snapshot = BatchSnapshot(record, Progress(eta=_eta(record, active, throughputs)))
                lifetime_s = max(_IDEMPOTENCY_KEY_LIFETIME_S, window)
                if await self.repository.add_batch(
                    snapshot, source, last_created, idempotency_key=key, key_lifetime_s=lifetime_s
                ):
                    return snapshot
        raise Conflict("The file or the batches of this key are being changed; try again.", param="input_file_id")

    async def _check_same_request(
        self, made: BatchSnapshot, request: CreateBatchRequest, fingerprint: str
    ) -> BatchSnapshot:
        if made.record.fingerprint == fingerprint:
            if made.record.input_file_id == request.input_file_id:
                return made
            second = await self._source(made.record.owner, request.input_file_id)
            if second.digest and second.digest == made.record.input_digest:
                return made
        raise Conflict(
            "This Idempotency-Key was used for another request.", param="Idempotency-Key", code="idempotency_key_reused"
        )

    async def _source(self, owner: str, text: str) -> FileRecord:
        record = await self._find_file(owner, text)
        if record is None:
            raise NotFound("No such file: input_file_id.", param="input_file_id")
        if record.purpose != INPUT_PURPOSE:
            raise InvalidRequest("The file's purpose must be 'batch'.", param="input_file_id", code="invalid_value")
        return record

    def _check_quota(self, owner: str, active: list[BatchSnapshot]) -> None:
        num_own = sum(snapshot.record.owner == owner for snapshot in active)
        if num_own >= self.config.max_active:
            message = f"This key has {num_own} batches that are not over."
            raise QuotaExceeded(message, retry_after_s=_QUOTA_RETRY_S)
        if len(active) >= MAX_ACTIVE:
            message = f"All keys together have {len(active)} batches that are not over, and may have no more."
            raise ResourceUnavailable(message, retry_after_s=_QUOTA_RETRY_S)

    async def batch(self, owner: str, text: str) -> BatchSnapshot:
        batch_id = parsed_batch_key(text)
        snapshot = await self.repository.batch(batch_id) if batch_id is not None else None
        if snapshot is None or snapshot.record.owner != owner:
            raise NotFound("No such batch.", param="batch_id")
        return snapshot

    async def batches(self, owner: str, *, after: str | None, limit: int) -> tuple[list[BatchSnapshot], bool]:
        """Return a page of batches, newest first, and whether there are more. Raises InvalidRequest."""
        response = await list_batches(self.repository, owner, after=after, limit=limit, newest_first=True)
        if response is None:
            raise InvalidRequest("after is not the id of a batch in this list.", param="after")
        return response

    async def cancel(self, owner: str, text: str) -> BatchSnapshot:
        """Request the cancellation of a batch; may be repeated. Raises NotFound, or Conflict if the batch is over."""
        snapshot = await self.batch(owner, text)
        batch_id: BatchKey = snapshot.record.batch_id
        if snapshot.record.is_over:
            message = f"The batch is {snapshot.record.status.value}; it can no longer be cancelled."
            raise Conflict(message, param="batch_id", code="batch_is_over")
        record = await self.repository.change_batch(
            batch_id, lambda batch: advance(batch, CancelRequested(), time.time())
        )
        return BatchSnapshot(record, snapshot.progress)

    async def pause(self, owner: str, text: str, *, is_paused: bool) -> BatchSnapshot:
        """Let no more lines start, or let them again; may be repeated. Raises NotFound, or Conflict if it is ending."""
        snapshot = await self.batch(owner, text)
        event = PauseRequested() if is_paused else ResumeRequested()
        record = await self.repository.change_batch(
            snapshot.record.batch_id, lambda batch: advance(batch, event, time.time())
        )
        if record.is_ending:
            message = f"The batch is {record.status.value}; it can no longer be paused or resumed."
            raise Conflict(message, param="batch_id", code="batch_is_over")
        return BatchSnapshot(record, snapshot.progress)


def _batches_key(keys: CurrentKeys, owner: str, request: CreateBatchRequest) -> KeyEntry:
    key = keys.ring.owned_by(client_of(owner))
    if FLEX not in key.tiers:
        message = f"The key {key.name} may not use service_tier flex, at which batches run."
        raise Forbidden(message, code="service_tier_not_allowed")
    if "priority" in request.model_fields_set:
        check_priority(request.priority, key)
    return key


def _check_tokens(
    key: KeyEntry, record: BatchRecord, active: Sequence[BatchSnapshot], throughputs: Throughputs
) -> None:
    limit = key.enqueued_batch_tokens
    if limit is None:
        return
    of_key = [snapshot for snapshot in active if client_of(snapshot.record.owner) == key.owner]
    before = sum(remaining_work(snapshot.record, snapshot.progress, throughputs).num_tokens for snapshot in of_key)
    more = remaining_work(record, Progress(), throughputs).num_tokens
    if before + more > limit:
        message = (
            f"Limit of enqueued batch tokens ({Limit.BATCH_TOKENS.value}) of the key {key.name}: limit {limit}, "
            f"enqueued about {before:.0f}, this batch about {more:.0f}."
        )
        raise QuotaExceeded(message, retry_after_s=None if more > limit else _QUOTA_RETRY_S)  # it alone is too large


def _eta(record: BatchRecord, active: Sequence[BatchSnapshot], throughputs: Throughputs) -> Eta:
    others = [remaining_work(snapshot.record, snapshot.progress, throughputs) for snapshot in active]
    return estimate_eta(remaining_work(record, Progress(), throughputs), others, throughputs, record.created_s)


def new_file_id() -> FileId:
    return file_id_of(secrets.token_bytes(NUM_ID_BYTES))


def _new_record(
    request: CreateBatchRequest,
    source: FileRecord,
    endpoint: Endpoint,
    schedule: Schedule,
    created_s: float,
    expires_s: float,
    fingerprint: str,
) -> BatchRecord:
    return BatchRecord(
        batch_id=batch_key_of(secrets.token_bytes(NUM_ID_BYTES)),
        owner=source.owner,
        endpoint=endpoint,
        input_file_id=source.file_id,
        output_file_id=new_file_id(),
        error_file_id=new_file_id(),
        completion_window=request.completion_window,
        created_s=created_s,
        expires_s=expires_s,
        output_lifetime_s=request.output_expires_after.seconds if request.output_expires_after else None,
        metadata=request.metadata,
        input_bytes=source.num_bytes,
        input_lines=source.num_lines,
        fingerprint=fingerprint,
        input_digest=source.digest,
        not_before_s=schedule.not_before_s or None,
        hours=request.hours,
        priority=request.priority,
    )


def _fingerprint(request: CreateBatchRequest) -> str:
    fields = request.model_dump(exclude={"input_file_id"})
    return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()


def input_line(custom_id: str, endpoint: Endpoint, body: dict[str, Any]) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": endpoint.value, "body": body}
    return orjson.dumps(line) + b"\n"


async def submit_lines(
    files_api: FilesApi,
    owner: str,
    pieces: AsyncIterator[bytes],
    endpoint: Endpoint,
    *,
    name: str = "",
    results_expire: ExpiresAfter | None = None,
) -> BatchSnapshot:
    """Create the batch that runs these lines within a day. The client does not know of their file: it goes with it.

    `pieces`: of the file. Raises InvalidRequest, QuotaExceeded, StorageFull.
    """
    file_id, digest = new_file_id(), blake2b(digest_size=16)
    blob = await files_api.stores.blobs.begin(file_id)
    upload = Upload(blob, name, fields={"purpose": INPUT_PURPOSE})
    try:
        async with files_api.arriving(owner) as take:
            async for piece in pieces:
                take(len(piece))
                digest.update(piece)
                upload.num_bytes += len(piece)
                upload.num_lines += piece.count(b"\n")
                await blob.write(piece)
        upload.digest = digest.hexdigest()
        record = await files_api.add_file(owner, file_id, upload)
    finally:
        await blob.discard()
    create_batch_request = CreateBatchRequest(
        input_file_id=record.file_id,
        endpoint=endpoint.value,
        completion_window=WINDOW,
        output_expires_after=results_expire,
    )
    try:
        return await files_api.create(owner, create_batch_request, None)
    except BaseException:
        # Where the store went away it may have the batch: then the file is in use, and stays.
        with contextlib.suppress(Conflict, NotFound, StorageError):
            await files_api.remove(owner, record.file_id)
        raise
