"""Events of responses that are generated in the background, in chunks, within limits of bytes.

| key | value |
|---|---|
| `response-events/<id>` | EventRange: which chunks were written, and which of them are left |
| `response-event-chunk/<id>/<number>` | events in the form in which they are sent |

The gateway that creates a response writes chunk 0, and the process that generates it writes the others, each once. The
oldest chunks make room when a response has too many bytes, and when all responses of one key together have too many.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from alignedserve.batches.interfaces import RecordStore
from alignedserve.batches.records import StoredRecord, decode, encode
from alignedserve.batches.responses.response_repository import (
    BoundedRecords,
    ConversationRepository,
    Entry,
    ResponseRepository,
)
from alignedserve.messages.state import Change, DeleteValue, SetValue

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
