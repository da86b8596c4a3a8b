"""Conversations in the record store: each is one record with all of its items, so that every change is atomic."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from alignedserve.batches.interfaces import RecordStore
from alignedserve.batches.records import StoredRecord, decode, encode
from alignedserve.batches.responses.bounded_records import BoundedRecords, Entry


class DeletedItem(NamedTuple):
    """Where an item was, for clients that delete what they list."""

    item_id: str
    place: int  # items that are there now, and were before it


class StoredConversation(StoredRecord, frozen=True):
    """One conversation."""

    conversation_id: str
    owner: str
    created_s: float
    metadata: dict[str, str]
    items: msgspec.Raw  # JSON of its items, the first one first
    pending: tuple[str, ...] = ()  # responses in the background whose items will be added
    deleted: tuple[DeletedItem, ...] = ()  # lately, the latest last


class ConversationRepository:
    """Keeps, finds, changes and deletes conversations. Every method raises StoreUnavailable while the store is down."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._records = BoundedRecords(store, "conversation")

    async def add(self, record: StoredConversation, *, now: float, lifetime_s: float, max_bytes: int) -> None:
        """Keep a new conversation. The owner's longest unchanged ones make room."""
        entry = _entry(record)
        kept = self._records.kept(entry, written_s=now, lifetime_s=lifetime_s)
        await self._store.commit(kept, unchanged={})
        await self._records.trim_when_due(record.owner, len(entry.raw), max_bytes)

    async def find(self, owner: str, conversation_id: str) -> StoredConversation | None:
        """Return a conversation; None for one that is not there or belongs to another owner."""
        raw = (await self._store.read([self._records.key(conversation_id)]))[0]
        record = None if raw is None else decode(raw, StoredConversation)
        return record if record is not None and record.owner == owner else None

    async def change(
        self,
        owner: str,
        conversation_id: str,
        changed: Callable[[StoredConversation], StoredConversation],
        *,
        now: float,
        lifetime_s: float,
        max_bytes: int,
    ) -> StoredConversation | None:
        """Replace a conversation by the result of `changed`, and renew its lifetime. None: it does not exist.

        `changed` is called again where another change came first; what it raises leaves the conversation as it was.
        """
        key = self._records.key(conversation_id)
        while True:
            raw = (await self._store.read([key]))[0]
            before = None if raw is None else decode(raw, StoredConversation)
            if raw is None or before is None or before.owner != owner:
                return None
            after = changed(before)
            entry = _entry(after)
            kept = self._records.kept(entry, written_s=now, lifetime_s=lifetime_s)
            changes = [self._records.unlisted(entry._replace(raw=raw)), *kept]
            if await self._store.commit(changes, unchanged={key: raw}):
                await self._records.trim_when_due(owner, max(0, len(entry.raw) - len(raw)), max_bytes)
                return after

    async def remove(self, record: StoredConversation) -> None:
        """Delete a conversation; may be repeated."""
        await self._records.remove(record.owner, record.conversation_id)


def _entry(record: StoredConversation) -> Entry:
    return Entry(record.owner, record.conversation_id, encode(record))
