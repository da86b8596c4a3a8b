"""Counts what a gateway's clients use, and writes it to the store every second.

A gateway that is killed loses what has ended since its last write, and what its open answers had used: an answer that
has ended more than a second before is in the store, as long as that answers. Nothing is counted twice.
"""

import asyncio
import logging
import secrets
import time
from itertools import islice

from alignedserve.core.errors import StorageError
from alignedserve.usage.records import UsageCounts, UsageSubject, hour_of
from alignedserve.usage.store import UsageStore

logger = logging.getLogger(__name__)

_WRITE_S = 1.0
_MAX_ROWS = 500  # of one write
_MAX_NAMES = 50  # with metrics of their own
OTHER = "other"


class UsageLedger:
    """Counts in memory; `write_on` makes it durable."""

    def __init__(self) -> None:
        self.totals: dict[UsageSubject, UsageCounts] = {}  # for metrics; keys after the first few are one row
        self._names: set[str] = set()
        self._pending: dict[tuple[int, UsageSubject], UsageCounts] = {}
        self._sending: dict[tuple[int, UsageSubject], UsageCounts] = {}
        self._source = f"gateway-{secrets.token_hex(12)}"
        self._number = 0
        self.is_kept = False  # by `write_on`: else nothing waits to be written
        self._writing = asyncio.Lock()

    def add(self, subject: UsageSubject, counts: UsageCounts) -> None:
        if len(self._names) < _MAX_NAMES:
            self._names.add(subject.key)
        shown = subject if subject.key in self._names else subject._replace(key=OTHER)
        self.totals[shown] = self.totals.get(shown, UsageCounts()).plus(counts)
        if self.is_kept:
            at = (hour_of(time.time()), subject)
            self._pending[at] = self._pending.get(at, UsageCounts()).plus(counts)

    async def write_on(self, store: UsageStore) -> None:
        """Write what is counted every second, until it is cancelled."""
        self.is_kept = True
        problem = ""
        while True:
            await asyncio.sleep(_WRITE_S)
            try:
                await self.write(store)
            except StorageError as error:
                if str(error) != problem:  # once: the log may be on the disk that is full
                    problem = str(error)
                    logger.warning("usage is kept in memory until it can be stored: %s", problem)
            else:
                if problem:
                    logger.info("usage is stored again")
                problem = ""

    async def write(self, store: UsageStore) -> None:
        """Write all that is counted. Raises StorageError: what may or may not be stored is settled by the next call."""
        async with self._writing:
            while self._sending or self._pending:
                if not self._sending:
                    self._sending = dict(islice(self._pending.items(), _MAX_ROWS))
                    for at in self._sending:
                        del self._pending[at]
                    self._number += 1
                await store.add(self._source, self._number, self._sending)
                self._sending = {}
