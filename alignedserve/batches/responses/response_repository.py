"""Responses in the record store, each with the items of its input; gateways share nothing else about them."""

import msgspec

from alignedserve.batches.interfaces import RecordStore
from alignedserve.batches.records import BatchKey, StoredRecord, decode, encode
from alignedserve.batches.responses.bounded_records import MAX_RECORD_BYTES, BoundedRecords, Entry
from alignedserve.core.errors import InvalidRequest


class StoredResponse(StoredRecord, frozen=True):
    """One response."""

    response_id: str
    owner: str
    created_s: float
    expires_s: float
    response: msgspec.Raw  # JSON of the response, as clients get it
    items: msgspec.Raw  # JSON of its input's items
    ancestors: tuple[str, ...] = ()  # the responses that it continues, the first one first
    context_bytes: int = 0  # of it and its ancestors
    batch_id: BatchKey | None = None  # the batch that generates it in the background; None: it is over
    conversation_id: str | None = None  # that it is part of


class ResponseRepository:
    """Keeps, finds and deletes responses. Every method raises StoreUnavailable while the store is down."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._records = BoundedRecords(store, "response")

    async def add(self, record: StoredResponse, *, now: float, max_bytes: int) -> None:
        """Keep a new response. The owner's oldest ones make room. Raises InvalidRequest where it is too large."""
        entry = _entry(record)
        if len(entry.raw) > MAX_RECORD_BYTES:
            message = "The response is too large to be kept; ask for it with store false."
            raise InvalidRequest(message, param="store", code="response_too_large")
        kept = self._records.kept(entry, written_s=record.created_s, lifetime_s=record.expires_s - now)
        await self._store.commit(kept, unchanged={})
        await self._records.trim_when_due(record.owner, len(entry.raw), max_bytes)

    async def settle(self, record: StoredResponse, *, now: float, max_bytes: int) -> StoredResponse:
        """Keep what became of a response, unless it was deleted meanwhile, and return what is kept.

        It makes room as a new one does. What was noted before stays: the batch's files are gone then.
        """
        entry, key = _entry(record), self._records.key(record.response_id)
        while (before := (await self._store.read([key]))[0]) is not None:
            known = decode(before, StoredResponse)
            if known.batch_id is None:
                return known
            kept = self._records.kept(entry, written_s=record.created_s, lifetime_s=record.expires_s - now)
            changes = [self._records.unlisted(entry._replace(raw=before)), *kept]
            if await self._store.commit(changes, unchanged={key: before}):
                await self._records.trim_when_due(record.owner, max(0, len(entry.raw) - len(before)), max_bytes)
                break
        return record

    async def find(self, owner: str, response_ids: list[str]) -> list[StoredResponse | None]:
        """Return the responses in order; None for one that is not there or belongs to another owner."""
        found = await self._store.read([self._records.key(response_id) for response_id in response_ids])
        records = [None if raw is None else decode(raw, StoredResponse) for raw in found]
        return [record if record is not None and record.owner == owner else None for record in records]

    async def remove(self, record: StoredResponse) -> None:
        """Delete a response; may be repeated."""
        await self._records.remove(record.owner, record.response_id)


def fits(record: StoredResponse) -> bool:
    """Return whether a response is small enough to be kept."""
    return len(encode(record)) <= MAX_RECORD_BYTES


def _entry(record: StoredResponse) -> Entry:
    return Entry(record.owner, record.response_id, encode(record))
