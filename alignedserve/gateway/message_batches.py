"""Message batches: each is a batch whose lines are messages, which the driver of batches runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson
from pydantic import Field

from alignedserve.api.anthropic.message_format import error_view
from alignedserve.api.anthropic.request_splitter import RequestSplitter
from alignedserve.api.errors import NotFound
from alignedserve.api.models.model_registry import check_usable
from alignedserve.api.openai.parsing import parse, parse_json
from alignedserve.api.schema import IgnoredFields, Schema
from alignedserve.api.work_lanes import note_class
from alignedserve.batches.records import BatchKey, BatchStatus, Endpoint, ResultKind, client_of
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.config.sections import BatchesConfig
from alignedserve.core.errors import InvalidRequest
from alignedserve.core.request import RequestClass
from alignedserve.gateway.files.batch_lists import list_batches
from alignedserve.gateway.files.files_api import FilesApi, input_line, submit_lines
from alignedserve.gateway.services import Services
from alignedserve.keys.entry import KeyEntry

# Codes of lines that did not run, and this API's names of them.
_UNRUN = {"batch_expired": "expired", "batch_cancelled": "canceled"}


class BatchedMessage(Schema):
    """One request of a batch. Its params are checked when it runs."""

    custom_id: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MessageBatches:
    """Message batches of one client."""

    files_api: FilesApi
    owner: str  # as api_owner makes it

    async def create(
        self, body: AsyncIterator[bytes], services: Services, ignored: IgnoredFields | None
    ) -> BatchSnapshot:
        """Create a batch of a body that is still arriving.

        `ignored`: gets the fields that are ignored; None: they are refused. Raises InvalidRequest naming the field,
        QuotaExceeded, StorageFull.
        """
        note_class(RequestClass.BEST_EFFORT)
        key = services.keys.ring.owned_by(client_of(self.owner))
        lines = _Lines(services, key, self.files_api.config, ignored)
        return await submit_lines(
            self.files_api, self.owner, lines.pieces(body), Endpoint.MESSAGES, name="messages.jsonl"
        )

    async def page(self, after: str | None, before: str | None, *, limit: int) -> tuple[list[BatchSnapshot], bool]:
        """Return batches, newest first, older than `after` or newer than `before`, and whether there are more there.

        Raises InvalidRequest.
        """
        if after is not None and before is not None:
            raise InvalidRequest("after_id and before_id cannot both be given.", param="before_id")
        cursor, name = (after, "after_id") if before is None else (before, "before_id")
        repository, is_newer = self.files_api.repository, before is not None
        response = await list_batches(repository, self.owner, after=cursor, limit=limit, newest_first=not is_newer)
        if response is None:
            raise InvalidRequest(f"{name} is not the id of a batch in this list.", param=name)
        snapshots, has_more = response
        return snapshots[::-1] if is_newer else snapshots, has_more

    async def remove(self, text: str) -> BatchKey:
        """Delete a batch that is over, with its results. Raises NotFound, InvalidRequest while it is not over.

        Its record goes last: if this is cut short, it may be repeated.
        """
        record = (await self.files_api.batch(self.owner, text)).record
        if not record.is_over:
            raise InvalidRequest("A batch that has not ended cannot be deleted; cancel it first.")
        for file_id in (record.input_file_id, *map(record.result_file, ResultKind)):
            with contextlib.suppress(NotFound):
                await self.files_api.remove(self.owner, file_id)
        await self.files_api.stores.logs.remove(record.batch_id)
        await self.files_api.repository.remove_batch(record)
        return record.batch_id

    async def results(self, snapshot: BatchSnapshot) -> AsyncIterator[bytes]:
        """Return the results, one on each line, in pieces, after reading the first of these.

        Raises NotFound before the batch is over. Raises StorageDamaged where they cannot be read, as later pieces do.
        """
        if not snapshot.record.is_over:
            raise NotFound("The batch has not ended.", param="message_batch_id")
        lines = self._result_lines(snapshot)
        return _joined(await anext(lines, b""), lines)

    async def _result_lines(self, snapshot: BatchSnapshot) -> AsyncIterator[bytes]:
        for kind in ResultKind:
            chunks = self.files_api.stores.logs.chunks(snapshot.record.batch_id, kind, snapshot.progress.log_bytes)
            async for lines in _whole_lines(chunks):
                yield await asyncio.to_thread(_results_of, lines)  # some thousands of them


class _Lines:
    def __init__(self, services: Services, key: KeyEntry, config: BatchesConfig, ignored: IgnoredFields | None) -> None:
        self._services, self._key, self._config, self._ignored = services, key, config, ignored
        self._splitter = RequestSplitter(config.max_line_bytes)
        self._custom_ids: set[str] = set()

    async def pieces(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in body:
            push = partial(self._push, chunk)
            if lines := await self._services.lanes.run(len(chunk), push, is_bounded=False):
                yield lines
        self._splitter.finish()
        if not self._custom_ids:
            raise InvalidRequest("requests must hold at least one request.", param="requests")
        for name in self._splitter.others:
            if self._ignored is None:
                raise InvalidRequest(f"Unrecognized request argument: {name}.", param=name, code="unknown_parameter")
            self._ignored.add(name)

    def _push(self, chunk: bytes) -> bytes:
        return b"".join([self._line(raw) for raw in self._splitter.push(chunk)])

    def _line(self, raw: bytes) -> bytes:
        path = f"requests[{len(self._custom_ids)}]"
        if len(self._custom_ids) >= self._config.max_lines:
            raise InvalidRequest(f"requests must hold at most {self._config.max_lines} requests.", param="requests")
        try:
            fields = parse_json(raw, self._services.config)
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {error}", param=path, code=error.code) from error
        one = parse(BatchedMessage, fields, self._ignored, parent=f"{path}.")
        if one.custom_id in self._custom_ids:
            raise InvalidRequest(f"{path}.custom_id was used by an earlier request.", param=f"{path}.custom_id")
        self._custom_ids.add(one.custom_id)
        model = one.params.get("model")
        if not isinstance(model, str):
            raise InvalidRequest(f"Invalid value for {path}.params.model.", param=f"{path}.params.model")
        check_usable(self._services.models, model, self._key)
        self._services.models.card(model)
        line = input_line(one.custom_id, Endpoint.MESSAGES, one.params)
        if len(line) > self._config.max_line_bytes:
            raise InvalidRequest("A request is too large for a batch.", param=path)
        return line


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for line in rest:
        yield line


async def _whole_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        lines, _, rest = (rest + chunk).rpartition(b"\n")
        if lines:
            yield lines
    if rest:
        yield rest


def _results_of(lines: bytes) -> bytes:
    return b"".join(orjson.dumps(result_view(orjson.loads(line))) + b"\n" for line in lines.split(b"\n"))


def batch_view(snapshot: BatchSnapshot, results_url: str) -> dict[str, Any]:
    """Return a batch; its results are at this address once it is over."""
    record = snapshot.record
    return {
        "id": record.batch_id,
        "type": "message_batch",
        "processing_status": _processing_status(snapshot),
        "request_counts": _counts(snapshot),
        "created_at": timestamp(record.created_s),
        "expires_at": timestamp(record.expires_s),
        "ended_at": timestamp(record.over_s) if record.is_over else None,
        "cancel_initiated_at": timestamp(record.cancelling_s) if record.cancelling_s is not None else None,
        "archived_at": None,
        "results_url": results_url if record.is_over else None,
    }


def result_view(line: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": line["custom_id"], "result": _result(line["response"], line["error"])}


def _result(response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    if response is not None and response["status_code"] == 200:
        return {"type": "succeeded", "message": response["body"]}
    if response is not None:
        return {"type": "errored", "error": response["body"]}
    assert error is not None, "a line without a response has an error"
    if error["code"] in _UNRUN:
        return {"type": _UNRUN[error["code"]]}
    return {"type": "errored", "error": error_view(error["message"], 500, None)}


def _processing_status(snapshot: BatchSnapshot) -> str:
    if snapshot.record.is_over:
        return "ended"
    return "canceling" if snapshot.record.status is BatchStatus.CANCELLING else "in_progress"


def _counts(snapshot: BatchSnapshot) -> dict[str, int]:
    counts, total = snapshot.progress.counts, snapshot.record.input_lines
    num_left = total - counts.num_ended
    has_failed = snapshot.record.status is BatchStatus.FAILED
    return {
        "processing": 0 if has_failed else num_left,
        "succeeded": counts.completed,
        "errored": counts.failed + (num_left if has_failed else 0),
        "canceled": counts.cancelled,
        "expired": counts.expired,
    }


def timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
