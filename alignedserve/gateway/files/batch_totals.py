"""Reads the totals of all batches for those who look again and again: scrapes, the live page, `alignedserve top`."""

import asyncio

from alignedserve.batches.records import BatchTotals
from alignedserve.batches.repository import BatchRepository
from alignedserve.core.errors import StorageError
from alignedserve.process.background_tasks import PatientReader

_PATIENCE_S = 1.0  # of a scrape, for which deploy/prometheus gives five seconds in all


class BatchTotalsReader:
    """Reads the totals of a repository, whose state may not answer."""

    def __init__(self) -> None:
        self._reader: PatientReader[BatchTotals | None] = PatientReader(_PATIENCE_S)

    async def read(self, repository: BatchRepository) -> BatchTotals | None:
        """Return the totals; None while the state cannot be reached, or does not answer at once."""
        return await self._reader.read(lambda: asyncio.create_task(_read(repository)))


async def _read(repository: BatchRepository) -> BatchTotals | None:
    try:
        return await repository.totals()
    except StorageError:
        return None
