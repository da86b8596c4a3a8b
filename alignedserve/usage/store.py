"""Usage in the record store, counted once whatever is killed.

| key | value |
|---|---|
| `usage/<hour>/<subject's digest>` | UsageRow |
| `usage-of/<source>` | what of a source is in the rows |
Indexes: `usage` (hours), `usage/<hour>` (the subjects' digests).

A source is a process of a gateway, whose value is the number of its last commit, or a batch, whose value is its totals.
A commit changes rows and source together. One whose end is not known is made again: if the source says that it was
carried out, it is not added a second time.

A damaged row begins anew, and what a damaged source had counted is not counted again: neither holds up what all others
use.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from alignedserve.core.errors import StorageDamaged, StoreUnavailable
from alignedserve.messages.state import AddToIndex, Change, SetValue
from alignedserve.usage.records import UsageCounts, UsageRow, UsageSubject, hour_of, row_id

_MAX_CONFLICTS = 100
_MAX_ROWS_AT_ONCE = 1000  # of a commit
_KEPT_DAYS = 400
_KEPT_S = _KEPT_DAYS * 86_400.0
_MAX_HOURS, _MAX_SUBJECTS = 24 * (_KEPT_DAYS + 1), 100_000
_SOURCE_KEPT_S = 60 * 86_400.0  # longer than a batch is kept

logger = logging.getLogger(__name__)

RecordT = TypeVar("RecordT", bound=msgspec.Struct)
Deltas = Mapping[tuple[int, UsageSubject], UsageCounts]


class _Page(Protocol):
    @property
    def members(self) -> tuple[str, ...]:
        """Names in order."""


class UsageRecords(Protocol):
    """What it needs of a store of records; see RecordStore."""

    async def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """See RecordStore."""

    async def commit(self, changes: Sequence[Change], *, unchanged: Mapping[str, bytes | None]) -> bool:
        """See RecordStore."""

    async def page(self, index: str, *, after: str | None, limit: int, newest_first: bool) -> _Page | None:
        """See RecordStore."""


class UsageStore:
    """Adds usage and reads it. Every method raises StoreUnavailable while the store is down."""

    def __init__(self, records: UsageRecords) -> None:
        self._records = records

    async def add(self, source: str, number: int, deltas: Deltas) -> None:
        """Add what a process has counted, unless its commit of this number was carried out. One call at a time."""
        key, after = f"usage-of/{source}", str(number).encode()
        for _ in range(_MAX_CONFLICTS):
            before = (await self._records.read([key]))[0]
            if before == after or await self._commit(key, before, after, deltas):
                return
            await asyncio.sleep(0)
        raise StoreUnavailable("Too many changes to usage at once.")

    async def count_batch(self, batch_id: str, subject: UsageSubject, totals: UsageCounts, now: float) -> None:
        """Add what a batch has used since it was last counted. `totals`: of all its lines that are on disk."""
        key, after = f"usage-of/{batch_id}", msgspec.json.encode(totals)
        for _ in range(_MAX_CONFLICTS):
            before = (await self._records.read([key]))[0]
            if before == after:
                return
            counted = UsageCounts() if before is None else _undamaged(before, UsageCounts, totals)
            deltas = {(hour_of(now), subject): totals.plus(counted, -1)}
            if await self._commit(key, before, after, deltas):
                return
            await asyncio.sleep(0)
        raise StoreUnavailable("Too many changes to usage at once.")

    async def _commit(self, key: str, before: bytes | None, after: bytes, deltas: Deltas) -> bool:
        assert len(deltas) <= _MAX_ROWS_AT_ONCE, "more rows than one commit may have"
        keys = [f"usage/{hour}/{row_id(subject)}" for hour, subject in deltas]
        rows = await self._records.read(keys)
        changes: list[Change] = [SetValue(key, after, _SOURCE_KEPT_S)]
        for row_key, raw, ((hour, subject), delta) in zip(keys, rows, deltas.items(), strict=True):
            anew = UsageRow(*subject, UsageCounts())
            known = anew if raw is None else _undamaged(raw, UsageRow, anew)
            row = UsageRow(*subject, known.counts.plus(delta))
            changes.append(SetValue(row_key, msgspec.json.encode(row), _KEPT_S))
            if raw is None:
                changes.append(AddToIndex("usage", str(hour), float(hour)))
                changes.append(AddToIndex(f"usage/{hour}", row_id(subject), 0.0))
        return await self._records.commit(changes, unchanged={key: before, **dict(zip(keys, rows, strict=True))})

    async def rows(self, start_s: int, end_s: int) -> dict[int, list[UsageRow]]:
        """Return the rows of the hours that begin from `start_s` to before `end_s`, by hour."""
        hours = [int(hour) for hour in await self._members("usage", _MAX_HOURS)]
        return {hour: await self._rows_of(hour) for hour in sorted(hours) if start_s <= hour < end_s}

    async def _rows_of(self, hour: int) -> list[UsageRow]:
        members = await self._members(f"usage/{hour}", _MAX_SUBJECTS)
        found = await self._records.read([f"usage/{hour}/{member}" for member in members])
        return [_decoded(raw, UsageRow) for raw in found if raw is not None]

    async def _members(self, index: str, limit: int) -> tuple[str, ...]:
        page = await self._records.page(index, after=None, limit=limit, newest_first=True)
        return () if page is None else page.members


def _undamaged(raw: bytes, kind: type[RecordT], otherwise: RecordT) -> RecordT:
    try:
        return _decoded(raw, kind)
    except StorageDamaged as error:
        logger.error("%s: it begins anew", error)
        return otherwise


def _decoded(raw: bytes, kind: type[RecordT]) -> RecordT:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.MsgspecError as error:
        raise StorageDamaged(f"stored usage cannot be read: {error}") from error
