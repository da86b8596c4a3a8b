"""Results of one batch on their way to its log. A line is done when its record is durable, not before."""

import asyncio

from alignedserve.batches.log.disk_log import DiskLog
from alignedserve.batches.log.log_format import LogTotals, ResultRecord
from alignedserve.core.errors import StorageError


class ResultWriter:
    """Collects records and writes all pending ones together."""

    def __init__(self, log: DiskLog, totals: LogTotals) -> None:
        self.totals = totals  # of durable records
        self.log_bytes = log.num_bytes  # durable, and in the totals
        self._log: DiskLog | None = log
        self._pending: list[ResultRecord] = []
        self._is_writing = False

    @property
    def has_pending(self) -> bool:
        return bool(self._pending) and self._log is not None

    @property
    def is_idle(self) -> bool:
        return not self._pending and not self._is_writing

    def add(self, *records: ResultRecord) -> None:
        self._pending += records

    async def write(self) -> list[ResultRecord]:
        """Write and return every pending record. Raises StorageError: they are pending again."""
        assert self._log is not None, "a write to a closed log"
        assert not self._is_writing, "two writes at a time"
        log, records = self._log, self._pending
        self._pending, self._is_writing = [], True
        try:
            await asyncio.to_thread(log.append, records)
        except StorageError:
            self._pending = records + self._pending
            raise
        finally:
            self._is_writing = False
        for record in records:
            self.totals.add(record)
        self.log_bytes = log.num_bytes
        return records

    def close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()
