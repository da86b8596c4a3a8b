"""Responses generated in the background: each is a batch of one line, which the driver of batches runs.

Its files and its batch belong to an owner beside the client's own, so that they are not in the client's lists; limits
of batches hold for both. What a batch has come to is seen, and kept with the response, when a client asks for it.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from alignedserve.api.errors import Conflict, NotFound
from alignedserve.api.responses.bodies import CreateResponseRequest
from alignedserve.api.responses.items import Item, item_id
from alignedserve.api.responses.request_builder import raw_json
from alignedserve.batches.records import (
    BACKGROUND,
    STREAMED_RESPONSE,
    BatchKey,
    BatchStatus,
    Endpoint,
    ResultKind,
    api_owner,
)
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.batches.responses.response_repository import StoredResponse
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.files.files_api import WINDOW, FilesApi, input_line, submit_lines
from alignedserve.gateway.files.schemas import MAX_LIFETIME_S, MIN_LIFETIME_S, ExpiresAfter

_STATUS = {
    BatchStatus.VALIDATING: "queued",
    BatchStatus.IN_PROGRESS: "in_progress",
    BatchStatus.FINALIZING: "in_progress",
    BatchStatus.CANCELLING: "in_progress",
}
_GENERATED = ("status", "output", "usage", "incomplete_details", "error", "completed_at")
_LEFT_OUT = {
    *("background", "conversation", "input", "metadata", "previous_response_id", "store", "stream", "stream_options"),
}
_SERVICE_TIERS = ("auto", "default", "flex")
_GONE = "The result of this response is not there any more."


async def _alone(line: bytes) -> AsyncIterator[bytes]:
    yield line


@dataclass(frozen=True, slots=True)
class BackgroundJobs:
    """Runs responses of one client as batches."""

    files_api: FilesApi
    owner: str
    lifetime_s: float  # of a stored response

    async def submit(self, request: CreateResponseRequest, items: list[Item], response: dict[str, Any]) -> BatchKey:
        """Create the batch that generates a response to these items. Raises InvalidRequest, QuotaExceeded.

        `response`: as it is now.
        """
        if request.service_tier not in _SERVICE_TIERS:
            raise InvalidRequest("A response in the background runs at best effort.", param="service_tier")
        line = _line(request, items, response)
        if len(line) > self.files_api.config.max_line_bytes:
            raise InvalidRequest("input is too large for the background.", param="input")
        snapshot = await submit_lines(
            self.files_api,
            self._owner,
            _alone(line),
            Endpoint.RESPONSES,
            name=response["id"],
            results_expire=ExpiresAfter(
                anchor="created_at", seconds=int(min(max(self.lifetime_s, MIN_LIFETIME_S), MAX_LIFETIME_S))
            ),
        )
        return snapshot.record.batch_id

    async def settled(self, record: StoredResponse, batch_id: BatchKey) -> StoredResponse:
        try:
            snapshot = await self.files_api.batch(self._owner, batch_id)
        except NotFound:
            return _changed(record, _failure(_GONE), None)
        if not snapshot.record.is_over:
            return _changed(record, {"status": _STATUS[snapshot.record.status]}, batch_id)
        return _changed(record, await self._outcome(snapshot, record.response_id), None)

    async def cancel(self, batch_id: BatchKey) -> bool:
        try:
            status = (await self.files_api.cancel(self._owner, batch_id)).record.status
        except (Conflict, NotFound):
            return False
        return status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED)  # else it ended meanwhile

    async def clean_up(self, batch_id: BatchKey) -> None:
        with contextlib.suppress(NotFound):
            record = (await self.files_api.batch(self._owner, batch_id)).record
            for file_id in (record.input_file_id, record.output_file_id, record.error_file_id):
                with contextlib.suppress(NotFound, Conflict):
                    await self.files_api.remove(self._owner, file_id)

    @property
    def _owner(self) -> str:
        return api_owner(self.owner, BACKGROUND)

    async def _outcome(self, snapshot: BatchSnapshot, response_id: str) -> dict[str, Any]:
        match snapshot.record.status:
            case BatchStatus.CANCELLED:
                return {"status": "cancelled"}
            case BatchStatus.COMPLETED:
                result = await self._result(snapshot)
                return _failure(_GONE) if result is None else _generated(result, response_id)
        problems = snapshot.record.problems
        return _failure(problems[0].message if problems else f"It was not generated within {WINDOW}.")

    async def _result(self, snapshot: BatchSnapshot) -> dict[str, Any] | None:
        progress = snapshot.progress
        kind = ResultKind.OUTPUT if progress.counts.completed else ResultKind.ERROR
        chunks = self.files_api.stores.logs.chunks(snapshot.record.batch_id, kind, progress.log_bytes)
        raw = b"".join([chunk async for chunk in chunks])
        return orjson.loads(raw) if raw else None


def _line(fields: CreateResponseRequest, items: list[Item], response: dict[str, Any]) -> bytes:
    body = fields.model_dump(exclude=_LEFT_OUT, exclude_none=True, exclude_unset=True, by_alias=True) | {"input": items}
    body |= {STREAMED_RESPONSE: response} if fields.stream else {}
    return input_line(response["id"], Endpoint.RESPONSES, body)


def _generated(result: dict[str, Any], response_id: str) -> dict[str, Any]:
    answer = result["response"]
    if answer is None:
        return _failure(result["error"]["message"])
    if answer["status_code"] != 200:
        return _failure(answer["body"]["error"]["message"])
    generated = {name: answer["body"][name] for name in _GENERATED}
    for index, item in enumerate(generated["output"]):
        item["id"] = item_id(item["type"], response_id, index)
    return generated


def _failure(message: str) -> dict[str, Any]:
    return {"status": "failed", "error": {"code": "server_error", "message": message}}


def _changed(record: StoredResponse, changes: dict[str, Any], batch_id: BatchKey | None) -> StoredResponse:
    response = orjson.loads(bytes(record.response)) | changes
    raw = raw_json(response)
    growth = len(bytes(raw)) - len(bytes(record.response))
    return msgspec.structs.replace(record, response=raw, batch_id=batch_id, context_bytes=record.context_bytes + growth)


def cancelled(record: StoredResponse) -> StoredResponse:
    return _changed(record, {"status": "cancelled", "completed_at": None}, None)


def too_large(record: StoredResponse) -> StoredResponse:
    return _changed(record, _failure("The response is too large to be kept.") | {"output": []}, None)


def without_room(record: StoredResponse) -> StoredResponse:
    return _changed(record, _failure("The conversation has no room for this response."), None)
