"""Files and batches in the record store. Gateways and the driver share nothing else; conflicting writes retry.

| key | value | written by |
|---|---|---|
| `file/<id>` | FileRecord | gateways; the driver for result files |
| `deleted/<id>` | DeletedFile | who deletes a file or batch, for an hour |
| `batch/<id>` | BatchRecord | gateways and the driver, for each step of its status |
| `progress/<id>` | Progress | the driver |
| `again/<owner>/<digest>` | batch id | gateways: an idempotency key that was used |
| `stock/<owner>` | StorageUsage | gateways |
| `capacity/models`, `harvest` | StoredThroughputs, BatchTotals | the driver |
Indexes: `files/<owner>`, `batches/<owner>`, `active` and `over` (batches, by creation and by end), `expiring` (files,
by time)."""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from alignedserve.batches.eta import ThroughputEstimate, Throughputs
from alignedserve.batches.interfaces import RecordStore
from alignedserve.batches.records import (
    BatchKey,
    BatchRecord,
    BatchTotals,
    FileId,
    FileRecord,
    Progress,
    RecordT,
    StoredRecord,
    client_of,
    decode,
    encode,
    parsed_batch_key,
    parsed_file_id,
)
from alignedserve.core.errors import StorageDamaged, StoreUnavailable
from alignedserve.messages.state import AddToIndex, Change, DeleteValue, RemoveFromIndex, SetValue
from alignedserve.usage.store import UsageStore

logger = logging.getLogger(__name__)

_THROUGHPUTS, _TOTALS = "capacity/models", "harvest"
ACTIVE = "active"
EXPIRING = "expiring"
OVER = "over"
_MAX_CONFLICTS = 20
MAX_ACTIVE, _MAX_LISTED = 10_000, 11_000  # of all owners; gateways that create some at once exceed it by a few
_CREATED_LIFETIME_S = 3600.0  # much longer than a batch's creation takes
_DELETED_LIFETIME_S = 3600.0  # and than a client takes from one page of a list to the next


class StoredThroughputs(StoredRecord, frozen=True):
    """What the driver has measured."""

    by_model: dict[str, ThroughputEstimate]


class StorageUsage(StoredRecord, frozen=True):
    """Files that one owner has stored."""

    num_files: int = 0
    num_bytes: int = 0


class DeletedFile(StoredRecord, frozen=True):
    """Where a file or batch was in its owner's list, for clients that delete what they list."""

    owner: str
    created_s: float


class FilePage(NamedTuple):
    """Part of a list of files."""

    file_ids: tuple[str, ...]
    files: list[FileRecord]  # of these ids; without those that were deleted meanwhile
    has_more: bool


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """A batch and its progress, as of one moment."""

    record: BatchRecord
    progress: Progress


class BatchRepository:
    """Creates, finds, lists and changes records. Every method raises StoreUnavailable while the store is down."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self.usage = UsageStore(store)  # in the same store
        self.unsaved: dict[str, bytes] = {}  # the driver's values by key, while the store takes none
        self._logged: set[str] = set()  # damage that was logged

    # --- files

    async def file(self, owner: str, file_id: FileId, now: float) -> FileRecord | None:
        """Return the file if it belongs to this owner and has not expired."""
        record = await self._read_one(f"file/{file_id}", FileRecord)
        return None if record is None or record.owner != owner or record.is_expired(now) else record

    async def add_file(self, record: FileRecord, *, fits: Callable[[StorageUsage], bool]) -> bool:
        """Add a new file; False: it exceeds the owner's quota."""
        for _ in range(_MAX_CONFLICTS):
            key = _usage_key(record.owner)
            raw = (await self._store.read([key]))[0]
            usage = _add_usage(_decode_usage(raw), 1, record.num_bytes)
            if not fits(usage):
                return False
            changes = [*_file_changes(record), SetValue(key, encode(usage))]
            if await self._store.commit(changes, unchanged={key: raw, f"file/{record.file_id}": None}):
                return True
        raise StoreUnavailable("Too many files are being added at once.")

    async def stored_by(self, owner: str) -> StorageUsage:
        """Return what the files of an owner take."""
        return _decode_usage((await self._store.read([_usage_key(owner)]))[0])

    async def remove_file(self, record: FileRecord) -> bool:
        """Delete a file record; False: it has changed since it was read (a batch was made from it)."""
        key, file_key = _usage_key(record.owner), f"file/{record.file_id}"
        deleted = DeletedFile(record.owner, record.created_s)
        for _ in range(_MAX_CONFLICTS):
            usage_raw, file_raw = await self._store.read([key, file_key])
            if file_raw is None or decode(file_raw, FileRecord) != record:
                return False
            changes: list[Change] = [DeleteValue(file_key), RemoveFromIndex(EXPIRING, record.file_id)]
            changes.append(RemoveFromIndex(f"files/{record.owner}", record.file_id))
            changes.append(SetValue(f"deleted/{record.file_id}", encode(deleted), _DELETED_LIFETIME_S))
            if record.view is None:
                changes.append(SetValue(key, encode(_add_usage(_decode_usage(usage_raw), -1, -record.num_bytes))))
            if await self._store.commit(changes, unchanged={key: usage_raw, file_key: file_raw}):
                return True
        raise StoreUnavailable("Too many files are being added or deleted at once.")

    async def files(self, owner: str, *, after: str | None, limit: int, newest_first: bool) -> FilePage | None:
        """List files of an owner. None: `after` is none of them."""
        if after is not None and parsed_file_id(after) is None:
            return None
        page = await self._store.page(f"files/{owner}", after=after, limit=limit, newest_first=newest_first)
        if page is None:
            return None
        values = await self._store.read([f"file/{file_id}" for file_id in page.members])
        return FilePage(page.members, ([decode(raw, FileRecord) for raw in values if raw is not None]), page.has_more)

    async def deleted(self, owner: str, text: str) -> DeletedFile | None:
        """Return where a file or batch of this owner was that was deleted within the last hour."""
        known = parsed_file_id(text) or parsed_batch_key(text)
        deletion = None if known is None else await self._read_one(f"deleted/{known}", DeletedFile)
        return deletion if deletion is not None and deletion.owner == owner else None

    async def expiring_files(self, limit: int) -> list[FileRecord]:
        """List files that have an expiry time, the earliest first, without those whose record is damaged."""
        file_ids = await self._first(EXPIRING, limit)
        files: list[FileRecord] = []
        for file_id, raw in zip(file_ids, await self._store.read([f"file/{key}" for key in file_ids]), strict=True):
            try:
                files += [] if raw is None else [decode(raw, FileRecord)]
            except StorageDamaged as error:
                self._log_once(f"{file_id} is left out: {error}")
        return files

    async def unknown_files(self, file_ids: Sequence[FileId]) -> list[FileId]:
        """Return the files that have no record."""
        records = await self._store.read([f"file/{file_id}" for file_id in file_ids])
        return [file_id for file_id, raw in zip(file_ids, records, strict=True) if raw is None]

    # --- batches

    async def last_created(self, client: str) -> bytes | None:
        """Return what changes whenever a batch is added for this client."""
        return (await self._store.read([_created_key(client)]))[0]

    async def add_batch(
        self,
        snapshot: BatchSnapshot,
        source: FileRecord,
        last_created: bytes | None,
        *,
        idempotency_key: str | None,
        key_lifetime_s: float,
    ) -> bool:
        """Add a new batch and count the use of its file.

        `last_created`: as it was before the client's batches were counted. Returns False where another has been added
        since, the file has changed, or the key was used before."""
        record = snapshot.record
        created_key = _created_key(client_of(record.owner))
        file_key = f"file/{source.file_id}"
        file_raw = (await self._store.read([file_key]))[0]
        if file_raw is None or decode(file_raw, FileRecord) != source:
            return False
        used = msgspec.structs.replace(source, num_uses=source.num_uses + 1)
        changes: list[Change] = [
            SetValue(f"batch/{record.batch_id}", encode(record)),
            SetValue(f"progress/{record.batch_id}", encode(snapshot.progress)),
            SetValue(file_key, encode(used)),
            AddToIndex(f"batches/{record.owner}", record.batch_id, record.created_s),
            AddToIndex(ACTIVE, record.batch_id, record.created_s),
            SetValue(created_key, record.batch_id.encode(), _CREATED_LIFETIME_S),
        ]
        unchanged: dict[str, bytes | None] = {
            file_key: file_raw,  # another version may have written it, with more in it
            f"batch/{record.batch_id}": None,
            created_key: last_created,
        }
        if idempotency_key is not None:
            changes.append(SetValue(idempotency_key, record.batch_id.encode(), key_lifetime_s))
            unchanged[idempotency_key] = None
        return await self._store.commit(changes, unchanged=unchanged)

    async def batch_with_key(self, idempotency_key: str) -> BatchSnapshot | None:
        """Return the batch that was created with this idempotency key."""
        raw = (await self._store.read([idempotency_key]))[0]
        batch_id = None if raw is None else parsed_batch_key(raw.decode("ascii", "replace"))
        return None if batch_id is None else await self.batch(batch_id)

    async def batch(self, batch_id: BatchKey) -> BatchSnapshot | None:
        batches = await self.batches([batch_id])
        return batches[0] if batches else None

    async def batches(self, batch_ids: Sequence[str]) -> list[BatchSnapshot]:
        """Return the batches that exist, in order. Raises StorageDamaged if one cannot be read."""
        return [_decode_snapshot(record, progress) for _, record, progress in await self._stored(batch_ids)]

    async def _stored(self, batch_ids: Sequence[str]) -> list[tuple[str, bytes, bytes | None]]:
        keys = [f"{kind}/{batch_id}" for batch_id in batch_ids for kind in ("batch", "progress")]
        values = await self._read(keys)
        rows = zip(batch_ids, values[::2], values[1::2], strict=True)
        return [(batch_id, record, progress) for batch_id, record, progress in rows if record is not None]

    async def list_batches(
        self, owner: str, *, after: str | None, limit: int, newest_first: bool = True
    ) -> tuple[list[BatchSnapshot], bool] | None:
        """List batches of an owner, and whether there are more. None: `after` is none of them."""
        if after is not None and parsed_batch_key(after) is None:
            return None
        page = await self._store.page(f"batches/{owner}", after=after, limit=limit, newest_first=newest_first)
        return None if page is None else (await self.batches(page.members), page.has_more)

    async def active_batches(self) -> list[BatchSnapshot]:
        """List all batches that are not over, oldest first, without those whose record is damaged."""
        return await self._readable(await self._first(ACTIVE, _MAX_LISTED))

    async def _readable(self, batch_ids: Sequence[str]) -> list[BatchSnapshot]:
        """Return the readable batches, for callers that serve all owners. Damaged progress is replaced by an empty one,
        as the driver recomputes it from the log."""
        snapshots: list[BatchSnapshot] = []
        for batch_id, record, progress in await self._stored(batch_ids):
            try:
                snapshot = _decode_snapshot(record, None)
            except StorageDamaged as error:
                self._log_once(f"{batch_id} is left out: {error}")
                continue
            try:
                snapshot = _decode_snapshot(record, progress)
            except StorageDamaged as error:
                self._log_once(f"{batch_id}: {error}")
            snapshots.append(snapshot)
        return snapshots

    def _log_once(self, damage: str) -> None:
        if damage not in self._logged:
            self._logged.add(damage)
            logger.error("%s", damage)

    async def change_batch(
        self, batch_id: BatchKey, change: Callable[[BatchRecord], BatchRecord], *, files: Sequence[FileRecord] = ()
    ) -> BatchRecord:
        """Apply a change to the present record; `files` are stored in the same commit."""
        key = f"batch/{batch_id}"
        for _ in range(_MAX_CONFLICTS):
            raw = (await self._store.read([key]))[0]
            if raw is None:
                raise StorageDamaged(f"{batch_id} is not in the store any more.")
            before = decode(raw, BatchRecord)
            after = change(before)
            if after is before:
                return before
            changes: list[Change] = [SetValue(key, encode(after))]
            changes += [entry for record in files for entry in _file_changes(record)]
            if after.is_over:
                changes += [RemoveFromIndex(ACTIVE, batch_id), AddToIndex(OVER, batch_id, after.over_s)]
            if await self._store.commit(changes, unchanged={key: raw}):
                if after.is_over:
                    self.unsaved.pop(f"progress/{batch_id}", None)
                return after
        raise StoreUnavailable("Too many changes to one batch at once.")

    async def save_progress(self, batch_id: BatchKey, progress: Progress, files: Sequence[FileRecord] = ()) -> None:
        """Store the progress of a batch; one call at a time. `files`: result files that are not empty any more. An
        earlier call that was given up, and which the store does late, never takes the place of this one's."""
        key = f"progress/{batch_id}"
        value = SetValue(key, encode(progress))
        changes = [value, *(change for record in files for change in _file_changes(record))]
        for _ in range(_MAX_CONFLICTS):
            with self._kept_if_unsaved(value):
                raw = (await self._store.read([key]))[0]
                if await self._store.commit(changes, unchanged={key: raw}):
                    return
        raise StoreUnavailable("Too many changes to the progress of one batch at once.")

    async def oldest_over(self, limit: int) -> list[BatchSnapshot]:
        """List batches that are over, the earliest first, without those whose record is damaged."""
        return await self._readable(await self._first(OVER, limit))

    async def remove_batch(self, record: BatchRecord) -> None:
        """Delete a batch; it must be over."""
        assert record.is_over, "an active batch cannot be removed"
        batch_id = record.batch_id
        changes: list[Change] = [DeleteValue(f"batch/{batch_id}"), DeleteValue(f"progress/{batch_id}")]
        changes += [RemoveFromIndex(f"batches/{record.owner}", batch_id), RemoveFromIndex(OVER, batch_id)]
        deleted = DeletedFile(record.owner, record.created_s)
        changes.append(SetValue(f"deleted/{batch_id}", encode(deleted), _DELETED_LIFETIME_S))
        await self._store.commit(changes, unchanged={})

    # --- statistics; damaged ones begin anew, and hold up no batch

    async def throughputs(self, assumed_tokens_per_s: float) -> Throughputs:
        """Return the measured throughput of every model, and an assumption for models that have run no line yet."""
        stored = await self._read_statistics(_THROUGHPUTS, StoredThroughputs)
        assumed = ThroughputEstimate(tokens_per_s=assumed_tokens_per_s)
        return Throughputs(assumed, stored.by_model if stored is not None else {})

    async def totals(self) -> BatchTotals:
        return await self._read_statistics(_TOTALS, BatchTotals) or BatchTotals()

    async def save_statistics(self, throughputs: Throughputs, totals: BatchTotals) -> None:
        """Store both."""
        stored = StoredThroughputs(by_model=dict(throughputs.by_model))
        changes = [SetValue(_THROUGHPUTS, encode(stored)), SetValue(_TOTALS, encode(totals))]
        with self._kept_if_unsaved(*changes):
            await self._store.commit(changes, unchanged={})

    async def close(self) -> None:
        await self._store.close()

    @contextlib.contextmanager
    def _kept_if_unsaved(self, *values: SetValue) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable:
            self.unsaved |= {value.key: value.value for value in values}
            raise
        for value in values:
            self.unsaved.pop(value.key, None)

    async def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.unsaved.get(key, raw) for key, raw in zip(keys, await self._store.read(keys), strict=True)]

    async def _read_one(self, key: str, kind: type[RecordT]) -> RecordT | None:
        raw = (await self._read([key]))[0]
        return None if raw is None else decode(raw, kind)

    async def _read_statistics(self, key: str, kind: type[RecordT]) -> RecordT | None:
        try:
            return await self._read_one(key, kind)
        except StorageDamaged as error:
            self._log_once(str(error))
            return None

    async def _first(self, index: str, limit: int) -> tuple[str, ...]:
        page = await self._store.page(index, after=None, limit=limit, newest_first=False)
        assert page is not None, "an index without a cursor has a beginning"
        return page.members


def idempotency_key_of(owner: str, key: str) -> str:
    """Return the store's key of an idempotency key, which contains only its digest: clients choose it freely."""
    return f"again/{owner}/{hashlib.sha256(key.encode()).hexdigest()}"


def _file_changes(record: FileRecord) -> list[Change]:
    changes: list[Change] = [
        SetValue(f"file/{record.file_id}", encode(record)),
        AddToIndex(f"files/{record.owner}", record.file_id, record.created_s),
    ]
    if record.expires_s is not None:
        changes.append(AddToIndex(EXPIRING, record.file_id, record.expires_s))
    return changes


def _created_key(client: str) -> str:
    return f"created/{client}"


def _usage_key(owner: str) -> str:
    return f"stock/{owner}"


def _decode_usage(raw: bytes | None) -> StorageUsage:
    return StorageUsage() if raw is None else decode(raw, StorageUsage)


def _add_usage(usage: StorageUsage, num_files: int, num_bytes: int) -> StorageUsage:
    return StorageUsage(num_files=max(0, usage.num_files + num_files), num_bytes=max(0, usage.num_bytes + num_bytes))


def _decode_snapshot(record: bytes, progress: bytes | None) -> BatchSnapshot:
    return BatchSnapshot(decode(record, BatchRecord), Progress() if progress is None else decode(progress, Progress))
