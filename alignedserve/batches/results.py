"""Results of a batch in OpenAI's shapes: the records of its lines, and the two files that show them."""

import asyncio

import orjson

from alignedserve.batches.interfaces import LineResponse
from alignedserve.batches.log.disk_log import DiskLog, LineOutcome, LogTotals, ResultRecord
from alignedserve.batches.records import BatchKey, BatchRecord, FileRecord, Progress, ResultKind, ResultView
from alignedserve.core.errors import StorageError

PURPOSE = "batch_output"
_EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
_CANCELLED = ("batch_cancelled", "This request was not executed because the batch was cancelled.")

# --- lines


def response_record(
    batch_id: BatchKey, line: int, custom_id: str, request_id: str, response: LineResponse
) -> ResultRecord:
    shown = {"status_code": response.status_code, "request_id": request_id, "body": orjson.Fragment(response.body)}
    outcome = LineOutcome.COMPLETED if response.is_success else LineOutcome.FAILED
    payload = _payload(batch_id, line, custom_id, shown, None)
    used = (response.input_tokens, response.output_tokens, response.cached_tokens, response.compute_us)
    return ResultRecord(line, outcome, payload, *used)


def failed_record(batch_id: BatchKey, line: int, custom_id: str, reason: str) -> ResultRecord:
    return _error_record(batch_id, line, custom_id, LineOutcome.FAILED, "request_failed", reason)


def retry_record(line: int) -> ResultRecord:
    """Build the record of a failed attempt: it still counts after a restart of the driver."""
    return ResultRecord(line, LineOutcome.RETRY, b"")


def expired_record(batch_id: BatchKey, line: int, custom_id: str) -> ResultRecord:
    """Build the record of a line that did not run before the window expired."""
    return _error_record(batch_id, line, custom_id, LineOutcome.EXPIRED, *_EXPIRED)


def cancelled_record(batch_id: BatchKey, line: int, custom_id: str) -> ResultRecord:
    """Build the record of a line that did not run before its batch was cancelled."""
    return _error_record(batch_id, line, custom_id, LineOutcome.CANCELLED, *_CANCELLED)


def line_id(batch_id: BatchKey, line: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}{line:06x}"


def _error_record(
    batch_id: BatchKey, line: int, custom_id: str, outcome: LineOutcome, code: str, message: str
) -> ResultRecord:
    error = {"code": code, "message": message}
    return ResultRecord(line, outcome, _payload(batch_id, line, custom_id, None, error))


def _payload(batch_id: BatchKey, line: int, custom_id: str, response: object, error: object) -> bytes:
    result = {"id": line_id(batch_id, line), "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(result)


# --- files: views of the result log, listed as soon as they are not empty


def result_bytes(progress: Progress, kind: ResultKind) -> int:
    """Return the present size of a result file."""
    return progress.output_bytes if kind is ResultKind.OUTPUT else progress.error_bytes


def result_files(record: BatchRecord, progress: Progress, expires_s: float | None) -> list[FileRecord]:
    """Build the records of the result files that are not empty. `expires_s` is None until the batch is over: they do
    not expire before."""
    counts = progress.counts
    num_lines = {ResultKind.OUTPUT: counts.completed, ResultKind.ERROR: counts.num_ended - counts.completed}
    created_s = record.in_progress_s or record.created_s
    return [
        FileRecord(
            file_id=record.result_file(kind),
            owner=record.owner,
            name=f"{record.batch_id}_{kind.value}.jsonl",
            purpose=PURPOSE,
            num_bytes=result_bytes(progress, kind),
            num_lines=num_lines[kind],
            created_s=created_s,
            expires_s=expires_s,
            view=ResultView(batch_id=record.batch_id, kind=kind),
        )
        for kind in ResultKind
        if result_bytes(progress, kind)
    ]


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
