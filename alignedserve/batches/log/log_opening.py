"""Opening a result log off the event loop."""

import asyncio

from alignedserve.batches.log.disk_log import DiskLog, DiskLogs, Recovered
from alignedserve.batches.records import BatchRecord


async def opened_log(logs: DiskLogs, record: BatchRecord) -> tuple[DiskLog, Recovered]:
    """As DiskLogs.open. Whoever is cancelled meanwhile leaves no lock behind: its thread cannot be cancelled."""
    opening = asyncio.ensure_future(asyncio.to_thread(logs.open, record.batch_id, record.num_lines))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        raise


def _close(opening: "asyncio.Future[tuple[DiskLog, Recovered]]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()
