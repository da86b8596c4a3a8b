"""Responses in the record store, each with the items of its input; gateways share nothing else about them.

| key | value |
|---|---|
| `response/<id>` | StoredResponse, until its lifetime is over |

Index `responses/<owner>`: `<id>:<bytes>`, by creation. What an owner keeps is bounded by trimming the index from its
old end: after as many new bytes as are a sixteenth of the bound, so that adding one is a single write and never
conflicts.
"""

import msgspec

from alignedserve.batches.interfaces import RecordStore
from alignedserve.batches.records import BatchKey, StoredRecord, decode, encode
from alignedserve.core.errors import StorageDamaged
from alignedserve.messages.state import AddToIndex, Change, DeleteValue, RemoveFromIndex, SetValue

MAX_RECORD_BYTES = 8_000_000  # what one value may hold on its way to the head
_OVERHEAD_BYTES = 256  # of a record in the store, beside its value
_TRIM_PART = 16
_PAGE = 1000


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


class ResponseRepository:
    """Keeps, finds and deletes responses. Every method raises StoreUnavailable while the store is down."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._num_untrimmed: dict[str, int] = {}  # bytes by owner, since the last trim

    async def add(self, record: StoredResponse, *, now: float, max_bytes: int) -> None:
        """Keep a new response. The owner's oldest ones make room."""
        raw = encode(record)
        await self._store.commit(_kept(record, raw, now), unchanged={})
        await self._trim_when_due(record.owner, len(raw), max_bytes)

    async def replace(self, record: StoredResponse, *, now: float) -> None:
        """Keep what became of a response, unless it was deleted meanwhile. May be repeated."""
        key = _key(record.response_id)
        before = (await self._store.read([key]))[0]
        if before is not None:
            changes = [_unlisted(record, before), *_kept(record, encode(record), now)]
            await self._store.commit(changes, unchanged={key: before})

    async def find(self, owner: str, response_ids: list[str]) -> list[StoredResponse | None]:
        """Return the responses in order; None for one that is not there or belongs to another owner."""
        found = await self._store.read([_key(response_id) for response_id in response_ids])
        records = [None if raw is None else decode(raw, StoredResponse) for raw in found]
        return [record if record is not None and record.owner == owner else None for record in records]

    async def remove(self, record: StoredResponse) -> None:
        """Delete a response; may be repeated."""
        key = _key(record.response_id)
        raw = (await self._store.read([key]))[0]
        if raw is not None:
            await self._store.commit([DeleteValue(key), _unlisted(record, raw)], unchanged={})

    async def _trim_when_due(self, owner: str, num_bytes: int, max_bytes: int) -> None:
        if owner in self._num_untrimmed and self._num_untrimmed[owner] + num_bytes <= max_bytes // _TRIM_PART:
            self._num_untrimmed[owner] += num_bytes
            return
        self._num_untrimmed[owner] = 0
        await self._trim(owner, max_bytes)

    async def _trim(self, owner: str, max_bytes: int) -> None:
        """Remove the oldest responses of an owner beyond its bytes. Expired ones are the oldest."""
        num_bytes, after = 0, None
        while page := await self._store.page(_index(owner), after=after, limit=_PAGE, newest_first=True):
            surplus: list[Change] = []
            for member in page.members:
                response_id, _, size = member.rpartition(":")
                num_bytes += _size_of(size) + _OVERHEAD_BYTES
                if num_bytes > max_bytes:
                    surplus += [DeleteValue(_key(response_id)), RemoveFromIndex(_index(owner), member)]
                else:
                    after = member
            if surplus:
                await self._store.commit(surplus, unchanged={})
            if not page.has_more:
                return


def _key(response_id: str) -> str:
    return f"response/{response_id}"


def _index(owner: str) -> str:
    return f"responses/{owner}"


def _member(record: StoredResponse, raw: bytes) -> str:
    return f"{record.response_id}:{len(raw)}"


def _kept(record: StoredResponse, raw: bytes, now: float) -> list[Change]:
    return [
        SetValue(_key(record.response_id), raw, max(0.001, record.expires_s - now)),
        AddToIndex(_index(record.owner), _member(record, raw), record.created_s),
    ]


def _unlisted(record: StoredResponse, raw: bytes) -> Change:
    return RemoveFromIndex(_index(record.owner), _member(record, raw))


def _size_of(text: str) -> int:
    if not text.isdigit():
        raise StorageDamaged("a list of responses cannot be read")
    return int(text)
