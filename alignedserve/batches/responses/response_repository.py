"""Responses in the record store, each with the items of its input; gateways share nothing else about them.

Events of responses that are generated in the background, in chunks, within limits of bytes.

| key | value |
|---|---|
| `response-events/<id>` | EventRange: which chunks were written, and which of them are left |
| `response-event-chunk/<id>/<number>` | events in the form in which they are sent |

The gateway that creates a response writes chunk 0, and the process that generates it writes the others, each once. The
oldest chunks make room when a response has too many bytes, and when all responses of one key together have too many."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from alignedserve.batches.interfaces import RecordStore
from alignedserve.batches.records import BatchKey, StoredRecord, decode, encode
from alignedserve.core.errors import InvalidRequest, StorageDamaged
from alignedserve.messages.state import AddToIndex, Change, DeleteValue, RemoveFromIndex, SetValue

MAX_RECORD_BYTES = 8_000_000  # what one value may hold on its way to the head
_OVERHEAD_BYTES = 256  # of a record in the store, beside its value
_TRIM_PART = 16
_PAGE = 1000


class Entry(NamedTuple):
    """One record as it is stored."""

    owner: str
    record_id: str
    raw: bytes


class BoundedRecords:
    """The records of one kind. Every method raises StoreUnavailable while the store is down."""

    def __init__(self, store: RecordStore, kind: str) -> None:
        self._store = store
        self._kind = kind
        self._num_untrimmed: dict[str, int] = {}  # bytes by owner, since the last trim

    def key(self, record_id: str) -> str:
        return f"{self._kind}/{record_id}"

    def kept(self, entry: Entry, *, written_s: float, lifetime_s: float) -> list[Change]:
        return [
            SetValue(self.key(entry.record_id), entry.raw, max(0.001, lifetime_s)),
            AddToIndex(self._index(entry.owner), _member(entry), written_s),
        ]

    def unlisted(self, entry: Entry) -> Change:
        return RemoveFromIndex(self._index(entry.owner), _member(entry))

    async def remove(self, owner: str, record_id: str) -> None:
        raw = (await self._store.read([self.key(record_id)]))[0]
        if raw is not None:
            changes = [DeleteValue(self.key(record_id)), self.unlisted(Entry(owner, record_id, raw))]
            await self._store.commit(changes, unchanged={})

    async def trim_when_due(self, owner: str, num_bytes: int, max_bytes: int) -> None:
        """Count new bytes of an owner, and let its oldest records make room once they are many."""
        if owner in self._num_untrimmed and self._num_untrimmed[owner] + num_bytes <= max_bytes // _TRIM_PART:
            self._num_untrimmed[owner] += num_bytes
            return
        self._num_untrimmed[owner] = 0
        await self._trim(owner, max_bytes)

    async def _trim(self, owner: str, max_bytes: int) -> None:
        num_bytes, after, index = 0, None, self._index(owner)
        while page := await self._store.page(index, after=after, limit=_PAGE, newest_first=True):
            surplus: list[Change] = []
            for member in page.members:
                record_id, _, size = member.rpartition(":")
                num_bytes += _size_of(size) + _OVERHEAD_BYTES
                if num_bytes > max_bytes:
                    surplus += [DeleteValue(self.key(record_id)), RemoveFromIndex(index, member)]
                else:
                    after = member
            if surplus:
                await self._store.commit(surplus, unchanged={})
            if not page.has_more:
                return

    def _index(self, owner: str) -> str:
        return f"{self._kind}s/{owner}"


def _member(entry: Entry) -> str:
    return f"{entry.record_id}:{len(entry.raw)}"


def _size_of(text: str) -> int:
    if not text.isdigit():
        raise StorageDamaged("a list of stored records cannot be read")
    return int(text)


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
        writes = self._records.kept(entry, written_s=record.created_s, lifetime_s=record.expires_s - now)
        await self._store.commit(writes, unchanged={})
        await self._records.trim_when_due(record.owner, len(entry.raw), max_bytes)

    async def settle(self, record: StoredResponse, *, now: float, max_bytes: int) -> StoredResponse:
        """Keep what became of a response, unless it was deleted meanwhile, and return what is kept. It makes room as a
        new one does. What was noted before stays: the batch's files are gone then."""
        entry, key = _entry(record), self._records.key(record.response_id)
        while (before := (await self._store.read([key]))[0]) is not None:
            known = decode(before, StoredResponse)
            if known.batch_id is None:
                return known
            writes = self._records.kept(entry, written_s=record.created_s, lifetime_s=record.expires_s - now)
            changes = [self._records.unlisted(entry._replace(raw=before)), *writes]
            if await self._store.commit(changes, unchanged={key: before}):
                await self._records.trim_when_due(record.owner, max(0, len(entry.raw) - len(before)), max_bytes)
                break
        return record

    async def find(self, owner: str, response_ids: list[str]) -> list[StoredResponse | None]:
        """Return the responses in order; None for one that is not there or belongs to another owner."""
        values = await self._store.read([self._records.key(response_id) for response_id in response_ids])
        records = [None if raw is None else decode(raw, StoredResponse) for raw in values]
        return [record if record is not None and record.owner == owner else None for record in records]

    async def remove(self, record: StoredResponse) -> None:
        """Delete a response; may be repeated."""
        await self._records.remove(record.owner, record.response_id)


def fits(record: StoredResponse) -> bool:
    """Return whether a response is small enough to be kept."""
    return len(encode(record)) <= MAX_RECORD_BYTES


def _entry(record: StoredResponse) -> Entry:
    return Entry(record.owner, record.response_id, encode(record))


class DeletedItem(NamedTuple):
    """The position of a deleted item, for clients that delete while they list."""

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
        entry = _conversation_entry(record)
        writes = self._records.kept(entry, written_s=now, lifetime_s=lifetime_s)
        await self._store.commit(writes, unchanged={})
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
        """Replace a conversation by the result of `changed`, and renew its lifetime. None: it does not exist. `changed`
        is called again where another change came first; what it raises leaves the conversation as it was."""
        key = self._records.key(conversation_id)
        while True:
            raw = (await self._store.read([key]))[0]
            before = None if raw is None else decode(raw, StoredConversation)
            if raw is None or before is None or before.owner != owner:
                return None
            after = changed(before)
            entry = _conversation_entry(after)
            writes = self._records.kept(entry, written_s=now, lifetime_s=lifetime_s)
            changes = [self._records.unlisted(entry._replace(raw=raw)), *writes]
            if await self._store.commit(changes, unchanged={key: raw}):
                await self._records.trim_when_due(owner, max(0, len(entry.raw) - len(raw)), max_bytes)
                return after

    async def remove(self, record: StoredConversation) -> None:
        """Delete a conversation; may be repeated."""
        await self._records.remove(record.owner, record.conversation_id)


def _conversation_entry(record: StoredConversation) -> Entry:
    return Entry(record.owner, record.conversation_id, encode(record))


_CHUNKS_PER_READ = 16


class EventLimits(NamedTuple):
    """Bytes of events that are kept; the last chunk of a response is, whatever its size."""

    per_response: int
    per_owner: int


class EventRange(StoredRecord, frozen=True):
    """Chunks of one response: from `first` on they are left, except those that made room for others of its owner."""

    end: int  # number of the next chunk
    first: int = 0
    num_first_bytes: int = 0  # of chunk 0


class EventChunk(NamedTuple):
    """One chunk; its events are None when they are not kept any more."""

    number: int
    events: bytes | None


class EventLog:
    """Reads chunks, and keeps new ones. Every method raises StoreUnavailable while the store is down."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._chunks = BoundedRecords(store, "response-event-chunk")

    async def written(self, response_id: str) -> EventRange | None:
        """Return which chunks of a response there are; None: none."""
        raw = (await self._store.read([_key(response_id)]))[0]
        return None if raw is None else decode(raw, EventRange)

    async def append(self, response_id: str, changes: list[Change], before: EventRange | None) -> bool:
        """Make changes to the chunks and the range of a response; False: its range is not `before`, none was made."""
        expected = None if before is None else encode(before)
        return await self._store.commit(changes, unchanged={_key(response_id): expected})

    async def make_room(self, owner: str, num_bytes: int, limits: EventLimits) -> None:
        """Let the oldest chunks of all responses of an owner go, once there are many new bytes."""
        await self._chunks.trim_when_due(owner, num_bytes, limits.per_owner)

    async def read(self, response_id: str, number: int) -> list[EventChunk]:
        """Return the chunks written from this number on, at most `_CHUNKS_PER_READ` at a time."""
        numbers = range(number, number + _CHUNKS_PER_READ)
        keys = [self._chunks.key(f"{response_id}/{index}") for index in numbers]
        raw, *chunks = await self._store.read([_key(response_id), *keys])
        written = decode(raw, EventRange) if raw is not None else EventRange(end=0)
        if number < written.first:  # all up to there have made room
            return [EventChunk(written.first - 1, None)]
        return [EventChunk(index, chunk) for index, chunk in zip(numbers, chunks, strict=True) if index < written.end]

    def kept(self, entry: Entry, *, now: float, lifetime_s: float) -> list[Change]:
        """Return the changes that keep a chunk."""
        return self._chunks.kept(entry, written_s=now, lifetime_s=lifetime_s)

    def removed(self, entry: Entry) -> list[Change]:
        """Return the changes that let a chunk go; of its bytes only their number counts."""
        return [DeleteValue(self._chunks.key(entry.record_id)), self._chunks.unlisted(entry)]


@dataclass(slots=True)
class EventWriter:
    """Writes chunks of one response: the first one, or after `begin` those behind it."""

    log: EventLog
    response_id: str
    owner: str  # of the response
    limits: EventLimits
    _range: EventRange | None = field(default=None, init=False)
    _sizes: deque[int] = field(default_factory=deque, init=False)  # of the chunks that are left
    _num_bytes: int = field(default=0, init=False)  # of those

    async def begin(self) -> bool:
        """Go on behind the first chunk; False: there is none, or an earlier attempt has gone on."""
        self._range = await self.log.written(self.response_id)
        if self._range is None or self._range.end != 1:
            return False
        self._num_bytes = self._range.num_first_bytes
        self._sizes.append(self._num_bytes)
        return True

    async def write(self, events: bytes, *, now: float, lifetime_s: float) -> bool:
        """Keep a chunk; False: another writer has one of this number."""
        before = self._range
        number = before.end if before is not None else 0
        changes = self.log.kept(self._entry(number, events), now=now, lifetime_s=lifetime_s)
        self._sizes.append(len(events))
        self._num_bytes += len(events)
        changes += self._make_room(number + 1 - len(self._sizes))
        self._range = EventRange(
            end=number + 1,
            first=number + 1 - len(self._sizes),
            num_first_bytes=before.num_first_bytes if before is not None else len(events),
        )
        changes.append(SetValue(_key(self.response_id), encode(self._range), lifetime_s))
        is_written = await self.log.append(self.response_id, changes, before)
        if is_written:
            await self.log.make_room(self.owner, len(events), self.limits)
        return is_written

    def _make_room(self, first: int) -> list[Change]:
        changes: list[Change] = []
        while self._num_bytes > self.limits.per_response and len(self._sizes) > 1:
            num_bytes = self._sizes.popleft()
            self._num_bytes -= num_bytes
            changes += self.log.removed(self._entry(first, bytes(num_bytes)))
            first += 1
        return changes

    def _entry(self, number: int, events: bytes) -> Entry:
        return Entry(self.owner, f"{self.response_id}/{number}", events)


def _key(response_id: str) -> str:
    return f"response-events/{response_id}"


class ResponseStores(NamedTuple):
    """Repositories that all gateways and the driver of batches share."""

    responses: ResponseRepository
    conversations: ConversationRepository
    events: EventLog


def response_stores(records: RecordStore) -> ResponseStores:
    return ResponseStores(ResponseRepository(records), ConversationRepository(records), EventLog(records))
