"""Writes the latest entries of the iteration log to a file; docs/iteration_log.md explains the columns."""

import logging
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from alignedserve.worker_core.iteration_log import IterationRecord

logger = logging.getLogger(__name__)

_DECIMALS = 7  # a tenth of a microsecond


def write_iterations(path: Path, records: Sequence[IterationRecord]) -> None:
    """Write one JSON object per line, oldest first. An earlier file is replaced atomically. Raises OSError."""
    clock_to_date_s = time.time() - time.monotonic()
    lines = [orjson.dumps(_columns_of(record, clock_to_date_s)) + b"\n" for record in records]
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(b"".join(lines))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _columns_of(record: IterationRecord, clock_to_date_s: float) -> dict[str, Any]:
    columns = {
        name: round(value, _DECIMALS) if isinstance(value, float) else value for name, value in record._asdict().items()
    }
    return {"started_at": datetime.fromtimestamp(record.started_s + clock_to_date_s, UTC).isoformat(), **columns}


def try_write_iterations(path: Path, records: Sequence[IterationRecord]) -> None:
    """Write the records, if there are any; log a warning if that fails."""
    if not records:
        return
    try:
        write_iterations(path, records)
    except OSError as error:
        logger.warning("the iteration log cannot be written to %s: %s", path, error.strerror)
