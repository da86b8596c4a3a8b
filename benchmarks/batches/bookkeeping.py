"""Overhead of a batch line beside its request: the real driver, store and disk, and a runner that responds at
once. Run by `python -m benchmarks.batches`."""

import asyncio
import json
import tempfile
import time
from pathlib import Path

from alignedserve.batches.driver import BatchDriver
from alignedserve.batches.interfaces import LineRequest, LineResponse, ModelState
from alignedserve.batches.location import RECORDS, DriverStores, stores_in
from alignedserve.batches.records import BatchKey, BatchRecord, Endpoint, FileId, FileRecord, Progress
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.batches.stores.sqlite_file import begin_file
from alignedserve.batches.stores.sqlite_records import SqliteRecords
from alignedserve.config.sections import BatchesConfig

_BATCH = BatchKey("batch_" + "0" * 24)
_FILES = tuple(FileId(f"file-{digit * 24}") for digit in "123")
_ANSWER = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 1_700_000_000,
    "model": "pocket",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "o t t e r"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15},
}


class _AtOnce:
    """A LineRunner without a cluster."""

    def __init__(self) -> None:
        self._body = json.dumps(_ANSWER).encode()

    async def run(self, call: LineRequest) -> LineResponse:
        await asyncio.sleep(0)
        return LineResponse(200, self._body, 9, 6)

    def model_states(self) -> dict[str, ModelState]:
        return {}

    def may_use(self, owner: str, name: str) -> bool:
        return True

    def model_of(self, name: str) -> str:
        return name


def measure_bookkeeping(num_lines: int, content: bytes) -> dict[str, float]:
    """Measure milliseconds of one core per line, of the driver and its store together; validation apart."""
    with tempfile.TemporaryDirectory() as name:
        begin_file(Path(name) / RECORDS)
        return asyncio.run(_measure(Path(name), num_lines, content))


async def _measure(folder: Path, num_lines: int, content: bytes) -> dict[str, float]:
    stores = stores_in(folder, SqliteRecords(folder / RECORDS))
    await _submit(stores, num_lines, content)
    config = BatchesConfig(max_lines=num_lines, max_line_bytes=1 << 22, file_lifetime_s=1e6)
    driver = BatchDriver(stores=stores, runner=_AtOnce(), config=config, models=("pocket",), max_in_flight=64)
    driving = asyncio.create_task(driver.run())
    validated_s = 0.0
    began_s = time.process_time()
    while True:
        await asyncio.sleep(0.05)
        snapshot = await stores.repository.batch(_BATCH)
        assert snapshot is not None, "the batch is there"
        if not validated_s and snapshot.record.num_lines:
            validated_s = time.process_time()
        if snapshot.record.is_over:
            break
    ended_s = time.process_time()
    driving.cancel()
    await asyncio.gather(driving, return_exceptions=True)
    await stores.repository.close()
    return {
        "lines": num_lines,
        "validating_ms_per_line": round((validated_s - began_s) / num_lines * 1e3, 4),
        "driver_ms_per_line": round((ended_s - validated_s) / num_lines * 1e3, 4),
        "all_ms_per_line": round((ended_s - began_s) / num_lines * 1e3, 4),
    }


async def _submit(stores: DriverStores, num_lines: int, content: bytes) -> None:
    writer = await stores.blobs.begin(_FILES[0])
    await writer.write(content)
    await writer.commit()
    now = time.time()
    size = len(content)
    source = FileRecord(
        file_id=_FILES[0], owner="me", name="in", purpose="batch", num_bytes=size, num_lines=num_lines, created_s=now
    )
    await stores.repository.add_file(source, fits=lambda _: True)
    record = BatchRecord(
        batch_id=_BATCH,
        owner="me",
        endpoint=Endpoint.CHAT,
        input_file_id=_FILES[0],
        output_file_id=_FILES[1],
        error_file_id=_FILES[2],
        completion_window="24h",
        created_s=now,
        expires_s=now + 86_400.0,
        output_lifetime_s=None,
        input_bytes=size,
        input_lines=num_lines,
        fingerprint="",
    )
    await stores.repository.add_batch(
        BatchSnapshot(record, Progress()), source, None, idempotency_key=None, key_lifetime_s=0.0
    )
