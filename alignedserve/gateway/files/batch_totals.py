"""Reads the totals of all batches for those who look again and again: scrapes, the live page, `alignedserve top`."""

import asyncio

from alignedserve.batches.records import BatchTotals
from alignedserve.batches.repository import BatchRepository
from alignedserve.core.errors import StorageError

_PATIENCE_S = 1.0  # of a scrape, for which deploy/prometheus gives five seconds in all


class BatchTotalsReader:
    """Reads one at a time: a state that does not answer holds up one call, and whoever looks only for a moment."""

    def __init__(self) -> None:
        self._reading: asyncio.Task[BatchTotals | None] | None = None

    async def read(self, repository: BatchRepository) -> BatchTotals | None:
        """Return the totals; None while the state cannot be reached, or does not answer at once."""
        reading = self._reading
        if reading is None:
            reading = self._reading = asyncio.create_task(_read(repository))
        await asyncio.wait({reading}, timeout=_PATIENCE_S)
        if not reading.done():
            return None
        if self._reading is reading:
            self._reading = None
        return reading.result()


async def _read(repository: BatchRepository) -> BatchTotals | None:
    try:
        return await repository.totals()
    except StorageError:
        return None
