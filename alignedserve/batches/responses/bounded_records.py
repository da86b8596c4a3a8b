"""Records of many owners in the record store. Each owner has a limit of bytes; its oldest records make room.

| key | value |
|---|---|
| `<kind>/<id>` | the record, until its lifetime is over |

Index `<kind>s/<owner>`: `<id>:<bytes>`, by the time of writing. It is trimmed from its old end whenever new bytes make
up a sixteenth of the limit, so that adding a record is a single write and never conflicts.
"""

from typing import NamedTuple

from alignedserve.batches.interfaces import RecordStore
from alignedserve.core.errors import StorageDamaged
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
