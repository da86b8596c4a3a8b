"""Files and batches in the record store: made, found, listed, changed. Gateways and the driver share this, and nothing
else: what two of them do at once is settled by the store, one of them reads again.

| key | value | written by |
|---|---|---|
| `file/<id>` | FileRecord | gateways; the driver for result files |
| `batch/<id>` | BatchRecord | whoever takes a step of its life |
| `progress/<id>` | Progress | the driver |
| `again/<owner>/<digest>` | batch id | gateways: an Idempotency-Key that was used |
| `stock/<owner>` | Stock | gateways: what a key has stored |
| `capacity`, `harvest` | Capacity, Harvest | the driver |
Lists: `files/<owner>`, `batches/<owner>`, `active` and `over` (batches, by creation and by end), `expiring` (files, by
time).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from alignedserve.batches.eta import Capacity
from alignedserve.batches.interfaces import Change, Delist, Enlist, Page, Put, RecordStore, Remove
from alignedserve.batches.records import (
    BatchKey,
    BatchRecord,
    BatchTotals,
    FileId,
    FileRecord,
    Kept,
    Progress,
    decode,
    encode,
    parsed_batch_key,
)
from alignedserve.core.errors import StorageDamaged, StoreUnavailable

logger = logging.getLogger(__name__)

_CAPACITY, _HARVEST = "capacity", "harvest"
ACTIVE = "active"
EXPIRING = "expiring"
OVER = "over"
_MAX_RACES = 20
_MAX_ACTIVE = 10_000


class StorageUsage(Kept, frozen=True):
    """What one key has stored."""

    num_files: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """A batch and how far it has come."""

    record: BatchRecord
    progress: Progress


class BatchRepository:
    """Every method raises StoreUnavailable while the store does not answer."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._told: set[str] = set()  # damage that is in the log by now

    # --- files

    async def file(self, owner: str, file_id: FileId, now: float) -> FileRecord | None:
        """The file, if it is this owner's and has not expired."""
        record = await self._file(file_id)
        if record is None or record.owner != owner or (record.expires_s is not None and now >= record.expires_s):
            return None
        return record

    async def add_file(self, record: FileRecord, *, fits: Callable[[StorageUsage], bool]) -> bool:
        """Keep a new file; False: the owner's stock has no room for it."""
        for _ in range(_MAX_RACES):
            key = _stock(record.owner)
            raw = (await self._store.read([key]))[0]
            stock = _grown(_stock_of(raw), 1, record.num_bytes)
            if not fits(stock):
                return False
            changes = [*_file_changes(record), Put(key, encode(stock))]
            if await self._store.commit(changes, unchanged={key: raw, f"file/{record.file_id}": None}):
                return True
        raise StoreUnavailable("Too many files are being added at once.")

    async def remove_file(self, record: FileRecord) -> bool:
        """Forget a file; False: it has changed since it was read (a batch was made from it), read again."""
        key = _stock(record.owner)
        stock_raw, file_raw = await self._store.read([key, f"file/{record.file_id}"])
        if file_raw is None or decode(file_raw, FileRecord) != record:
            return False
        changes: list[Change] = [
            Remove(f"file/{record.file_id}"),
            Delist(f"files/{record.owner}", record.file_id),
            Delist(EXPIRING, record.file_id),
        ]
        if record.view is None:
            changes.append(Put(key, encode(_grown(_stock_of(stock_raw), -1, -record.num_bytes))))
        unchanged = {key: stock_raw, f"file/{record.file_id}": file_raw}
        return await self._store.commit(changes, unchanged=unchanged)

    async def files(self, owner: str, *, after: str | None, limit: int, newest_first: bool) -> list[FileRecord] | None:
        """Files of an owner, one more than `limit` where there are more. None: `after` is none of them."""
        page = await self._store.page(f"files/{owner}", after=after, limit=limit + 1, newest_first=newest_first)
        if page is None:
            return None
        found = await self._store.read([f"file/{member}" for member in page.members])
        return [decode(raw, FileRecord) for raw in found if raw is not None]

    async def expiring_files(self, limit: int) -> list[FileRecord]:
        """Files that have a time at which they expire, the first ones first."""
        page = await self._store.page(EXPIRING, after=None, limit=limit, newest_first=False)
        assert page is not None, "a list without a cursor has a beginning"
        found = await self._store.read([f"file/{member}" for member in page.members])
        return [decode(raw, FileRecord) for raw in found if raw is not None]

    async def unknown_files(self, file_ids: Sequence[FileId]) -> list[FileId]:
        """Those of which there is no record."""
        found = await self._store.read([f"file/{file_id}" for file_id in file_ids])
        return [file_id for file_id, raw in zip(file_ids, found, strict=True) if raw is None]

    # --- batches

    async def add_batch(self, sight: BatchSnapshot, source: FileRecord, *, again: str | None, again_s: float) -> bool:
        """Keep a new batch and count the use of its file. False: the file has changed or the `again` key is taken."""
        record = sight.record
        file_key = f"file/{source.file_id}"
        used = msgspec.structs.replace(source, num_uses=source.num_uses + 1)
        changes: list[Change] = [
            Put(f"batch/{record.batch_id}", encode(record)),
            Put(f"progress/{record.batch_id}", encode(sight.progress)),
            Put(file_key, encode(used)),
            Enlist(f"batches/{record.owner}", record.batch_id, record.created_s),
            Enlist(ACTIVE, record.batch_id, record.created_s),
        ]
        unchanged: dict[str, bytes | None] = {file_key: encode(source), f"batch/{record.batch_id}": None}
        if again is not None:
            changes.append(Put(again, record.batch_id.encode(), again_s))
            unchanged[again] = None
        return await self._store.commit(changes, unchanged=unchanged)

    async def made_before(self, again: str) -> BatchKey | None:
        """The batch that was created with this idempotency key."""
        raw = (await self._store.read([again]))[0]
        return None if raw is None else parsed_batch_key(raw.decode("ascii", "replace"))

    async def batch(self, batch_id: BatchKey) -> BatchSnapshot | None:
        """A batch, whoever's it is."""
        found = await self.batches([batch_id])
        return found[0] if found else None

    async def batches(self, batch_ids: Sequence[str]) -> list[BatchSnapshot]:
        """Those of these batches that there are, in order. Raises StorageDamaged where one cannot be read."""
        return [_sight(record, progress) for _, record, progress in await self._stored(batch_ids)]

    async def _stored(self, batch_ids: Sequence[str]) -> list[tuple[str, bytes, bytes | None]]:
        keys = [f"{kind}/{batch_id}" for batch_id in batch_ids for kind in ("batch", "progress")]
        found = await self._store.read(keys)
        rows = zip(batch_ids, found[::2], found[1::2], strict=True)
        return [(batch_id, record, progress) for batch_id, record, progress in rows if record is not None]

    async def list_batches(
        self, owner: str, *, after: str | None, limit: int
    ) -> tuple[list[BatchSnapshot], bool] | None:
        """Batches of an owner, newest first, and whether there are more. None: `after` is none of them."""
        page = await self._store.page(f"batches/{owner}", after=after, limit=limit, newest_first=True)
        if page is None:
            return None
        return await self.batches(page.members), page.has_more

    async def active_batches(self) -> list[BatchSnapshot]:
        """Every batch that is not over, oldest first, but those whose record is damaged."""
        page: Page | None = await self._store.page(ACTIVE, after=None, limit=_MAX_ACTIVE, newest_first=False)
        assert page is not None, "a list without a cursor has a beginning"
        return await self._readable(page.members)

    async def _readable(self, batch_ids: Sequence[str]) -> list[BatchSnapshot]:
        """For whoever serves all keys: one damaged batch stops no other. Damaged progress counts as none, as the
        driver adds it up anew from the log."""
        sights: list[BatchSnapshot] = []
        for batch_id, record, progress in await self._stored(batch_ids):
            try:
                sight = _sight(record, None)
            except StorageDamaged as error:
                self._tell(f"{batch_id} is left out: {error}")
                continue
            try:
                sight = _sight(record, progress)
            except StorageDamaged as error:
                self._tell(f"{batch_id}: {error}")
            sights.append(sight)
        return sights

    def _tell(self, damage: str) -> None:
        """Once: the driver looks several times a second."""
        if damage not in self._told:
            self._told.add(damage)
            logger.error("%s", damage)

    async def change_batch(
        self, batch_id: BatchKey, change: Callable[[BatchRecord], BatchRecord], *, files: Sequence[FileRecord] = ()
    ) -> BatchRecord:
        """Take a step of a batch's life, from the record as it is now; `files` are kept along with it."""
        key = f"batch/{batch_id}"
        for _ in range(_MAX_RACES):
            raw = (await self._store.read([key]))[0]
            if raw is None:
                raise StorageDamaged(f"{batch_id} is not in the store any more.")
            before: BatchRecord = decode(raw, BatchRecord)
            after = change(before)
            if after is before:
                return before
            changes: list[Change] = [Put(key, encode(after))]
            changes += [one for record in files for one in _file_changes(record)]
            if after.is_over:
                changes += [Delist(ACTIVE, batch_id), Enlist(OVER, batch_id, after.over_s)]
            if await self._store.commit(changes, unchanged={key: raw}):
                return after
        raise StoreUnavailable("Too many changes to one batch at once.")

    async def save_progress(self, batch_id: BatchKey, progress: Progress, files: Sequence[FileRecord] = ()) -> None:
        """Keep how far a batch has come. `files`: result files that have something in them now."""
        changes: list[Change] = [Put(f"progress/{batch_id}", encode(progress))]
        changes += [one for record in files for one in _file_changes(record)]
        await self._store.commit(changes, unchanged={})

    async def oldest_over(self, limit: int) -> list[BatchSnapshot]:
        """Batches that are over, the first ones first, but those whose record is damaged."""
        page = await self._store.page(OVER, after=None, limit=limit, newest_first=False)
        assert page is not None, "a list without a cursor has a beginning"
        return await self._readable(page.members)

    async def remove_batch(self, record: BatchRecord) -> None:
        """Forget a batch that is over: nothing changes it any more."""
        assert record.is_over, "a batch that runs is not forgotten"
        batch_id = record.batch_id
        changes: list[Change] = [Remove(f"batch/{batch_id}"), Remove(f"progress/{batch_id}")]
        changes += [Delist(f"batches/{record.owner}", batch_id), Delist(OVER, batch_id)]
        await self._store.commit(changes, unchanged={})

    # --- others

    async def capacity(self, assumed_tokens_per_s: float) -> Capacity:
        """What the driver has learned of lines; an assumption where it has not run any yet."""
        raw = (await self._store.read([_CAPACITY]))[0]
        found: Capacity = Capacity(tokens_per_s=assumed_tokens_per_s) if raw is None else decode(raw, Capacity)
        return found

    async def harvest(self) -> BatchTotals:
        """What batches have come to."""
        raw = (await self._store.read([_HARVEST]))[0]
        found: BatchTotals = BatchTotals() if raw is None else decode(raw, BatchTotals)
        return found

    async def save_learned(self, capacity: Capacity, harvest: BatchTotals) -> None:
        """Keep both."""
        changes = [Put(_CAPACITY, encode(capacity)), Put(_HARVEST, encode(harvest))]
        await self._store.commit(changes, unchanged={})

    async def _file(self, file_id: FileId) -> FileRecord | None:
        raw = (await self._store.read([f"file/{file_id}"]))[0]
        found: FileRecord | None = None if raw is None else decode(raw, FileRecord)
        return found


def idempotency_key_of(owner: str, digest: str) -> str:
    """Where an idempotency key of this owner is kept; `digest` is of the key, which a client wrote."""
    return f"again/{owner}/{digest}"


def _file_changes(record: FileRecord) -> list[Change]:
    changes: list[Change] = [
        Put(f"file/{record.file_id}", encode(record)),
        Enlist(f"files/{record.owner}", record.file_id, record.created_s),
    ]
    if record.expires_s is not None:
        changes.append(Enlist(EXPIRING, record.file_id, record.expires_s))
    return changes


def _stock(owner: str) -> str:
    return f"stock/{owner}"


def _stock_of(raw: bytes | None) -> StorageUsage:
    stock: StorageUsage = StorageUsage() if raw is None else decode(raw, StorageUsage)
    return stock


def _grown(stock: StorageUsage, num_files: int, num_bytes: int) -> StorageUsage:
    return StorageUsage(num_files=max(0, stock.num_files + num_files), num_bytes=max(0, stock.num_bytes + num_bytes))


def _sight(record: bytes, progress: bytes | None) -> BatchSnapshot:
    return BatchSnapshot(decode(record, BatchRecord), Progress() if progress is None else decode(progress, Progress))
