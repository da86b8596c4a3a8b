"""Documents as batches of the Files and Batches API."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from typing_extensions import override

from alignedserve.cli.batch.client import BatchClient, DownloadReceiver, RequestRefused
from alignedserve.cli.batch.formatting import OVER
from lab.certification.judged_lines import LineJudge, read_answer
from lab.certification.protocol import PlannedBatch
from lab.certification.records import BatchRecord
from lab.commands.certify.calls import CallMaker
from lab.commands.certify.documents import Documents, DocumentsLog

_DEFAULT_WINDOW = "24h"  # which every server with batches takes
_CANCEL_S = 5.0
_UNREAD = "failed, not read why"


class NoBatches(Exception):
    """The server has no Files and Batches API."""


class _OpenBatch:
    def __init__(self, plan: PlannedBatch, batch: dict[str, Any], began_s: float) -> None:
        self.plan = plan
        self.batch = batch
        self.began_s = began_s
        self.ended_s: float | None = None

    @property
    def num_completed(self) -> int:
        return self._count("completed")

    @property
    def num_failed(self) -> int:
        return self._count("failed")

    @property
    def num_ended(self) -> int:
        return self.num_completed + self.num_failed

    def _count(self, name: str) -> int:
        return int((self.batch.get("request_counts") or {}).get(name) or 0)


class BatchDocuments(Documents):
    """Sends documents as batches."""

    words = "batches of /v1/batches"

    def __init__(self, *, client: BatchClient, calls: CallMaker, poll_s: float, patience_s: float) -> None:
        self._client = client
        self._calls = calls
        self._poll_s = poll_s
        self._patience_s = patience_s

    @override
    async def run(self, batches: Sequence[PlannedBatch], expected: Mapping[int, str], log: DocumentsLog) -> None:
        with TemporaryDirectory(prefix="certify-") as folder:
            paths = await asyncio.to_thread(self._write, batches, Path(folder))
            files = [await self._upload(path) for path in paths]
        log.begin()
        opened: list[_OpenBatch] = []
        judged: set[str] = set()
        try:
            for plan, file_id in zip(batches, files, strict=True):
                opened.append(await self._create(plan, file_id, log))
            await self._watch(opened, log)
            for batch in opened:
                log.batches.append(await self._judge(batch, expected))
                judged.add(batch.plan.name)
        finally:
            await self._leave(opened, files)
            log.batches += [_unjudged(batch) for batch in opened if batch.plan.name not in judged]

    def _write(self, batches: Sequence[PlannedBatch], folder: Path) -> list[Path]:
        paths = []
        for batch in batches:
            path = folder / f"certify-{batch.name}.jsonl"
            lines = (
                msgspec.json.encode(
                    {
                        "custom_id": line.custom_id,
                        "method": "POST",
                        "url": self._calls.api.path,
                        "body": self._calls.body(line.request),
                    }
                )
                for line in batch.lines
            )
            path.write_bytes(b"\n".join(lines) + b"\n")
            paths.append(path)
        return paths

    async def _upload(self, path: Path) -> str:
        try:
            return str((await self._client.upload(path, lambda count: None))["id"])
        except RequestRefused as error:
            raise _without_batches(error) from error

    async def _create(self, plan: PlannedBatch, file_id: str, log: DocumentsLog) -> _OpenBatch:
        began_s, window = time.monotonic(), f"{plan.window_s:.0f}s"
        body = {"input_file_id": file_id, "endpoint": self._calls.api.path}
        try:
            batch = await self._client.create(body | {"completion_window": window}, f"certify-{uuid.uuid4().hex}")
        except RequestRefused as error:
            if error.status not in (400, 422):
                raise _without_batches(error) from error
            batch = await self._client.create(
                body | {"completion_window": _DEFAULT_WINDOW}, f"certify-{uuid.uuid4().hex}"
            )
            log.notes.append(f"The server refuses a window of {window} ({error}): it was asked for {_DEFAULT_WINDOW}.")
        return _OpenBatch(plan, batch, began_s)

    async def _watch(self, opened: Sequence[_OpenBatch], log: DocumentsLog) -> None:
        while True:
            for batch in opened:
                if batch.ended_s is None:
                    batch.batch = await self._client.batch(batch.batch["id"])
                    if batch.batch.get("status") in OVER:
                        batch.ended_s = time.monotonic()
            log.step(sum(batch.num_ended for batch in opened))
            if any(open_batch.batch.get("status") != "validating" for open_batch in opened):
                log.has_begun.set()
            ends_s = [batch.ended_s for batch in opened]
            if None not in ends_s:
                log.ended_s = max(filter(None, ends_s))
                return
            log.require_progress(self._patience_s)
            await asyncio.sleep(self._poll_s)

    async def _judge(self, one: _OpenBatch, expected: Mapping[int, str]) -> BatchRecord:
        judged = LineJudge(one.plan, expected)
        for name in ("output_file_id", "error_file_id"):
            if file_id := one.batch.get(name):
                for line in (await self._content(str(file_id))).splitlines():
                    judged.take(read_answer(line))
        return judged.record(str(one.batch.get("status")), one.began_s, one.ended_s)

    async def _content(self, file_id: str) -> bytes:
        received = bytearray()
        await self._client.receive(file_id, DownloadReceiver(lambda: len(received), received.extend))
        return bytes(received)

    async def _leave(self, opened: Sequence[_OpenBatch], files: Sequence[str]) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_CANCEL_S):
                for batch in opened:
                    if batch.ended_s is None:
                        with contextlib.suppress(RequestRefused):
                            await self._client.cancel(batch.batch["id"])
                for file_id in files:
                    with contextlib.suppress(RequestRefused):
                        await self._client.delete_file(file_id)


def _without_batches(error: RequestRefused) -> Exception:
    return NoBatches(str(error)) if error.status in (404, 405, 501) else error


def _unjudged(one: _OpenBatch) -> BatchRecord:
    return BatchRecord(
        name=one.plan.name,
        window_s=one.plan.window_s,
        num_lines=len(one.plan.lines),
        began_s=one.began_s,
        ended_s=one.ended_s,
        status=str(one.batch.get("status")),
        num_answered=one.num_completed,
        failures={_UNREAD: one.num_failed} if one.num_failed else {},
    )
