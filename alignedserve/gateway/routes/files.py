"""Routes of files and batches: /v1/files, /v1/batches and /v1/messages/batches."""

from collections.abc import AsyncIterator
from functools import partial

from starlette.responses import Response, StreamingResponse

from alignedserve.api.errors import RangeNotSatisfiable
from alignedserve.api.openai.parsing import parse
from alignedserve.batches.records import api_owner
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.core.errors import InvalidRequest, StorageDamaged
from alignedserve.gateway import message_batches
from alignedserve.gateway.call import Call, RouteTable
from alignedserve.gateway.files.files_api import new_file_id
from alignedserve.gateway.files.lists import list_files, sizes_of
from alignedserve.gateway.files.schemas import CreateBatchRequest, batch_view, file_view, limits_view, list_view
from alignedserve.gateway.files.uploads import receive_upload
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.message_batches import MessageBatches
from alignedserve.gateway.routes.request_bodies import body_chunks, read_body
from alignedserve.gateway.routes.request_parameters import first_byte, one_of, positive

ROUTES = RouteTable()

_MAX_FILES = 10_000  # of a page
_DEFAULT_BATCHES, _MAX_BATCHES = 20, 100  # of a page
_MAX_IDEMPOTENCY_KEY_LEN = 255
_BATCH = "/v1/batches/{batch_id}"
_MESSAGES = "/v1/messages/batches"


@ROUTES.add("POST", "/v1/files")
async def create_file(call: Call) -> Response:
    files_api, owner = call.files_api, call.key.owner
    file_id, most = new_file_id(), files_api.config.max_file_bytes
    async with files_api.arriving(owner) as take:
        upload = await receive_upload(call.http, files_api.stores.blobs, file_id, most, take)
    try:
        record = await files_api.add_file(owner, file_id, upload)
    finally:
        await upload.blob.discard()
    return JsonResponse(file_view(record, record.num_bytes))


@ROUTES.add("GET", "/v1/files")
async def list_of_files(call: Call) -> Response:
    repository = call.files_api.repository
    records, has_more = await list_files(
        repository,
        call.key.owner,
        after=call.http.query_params.get("after"),
        limit=positive(call, "limit", default=_MAX_FILES, at_most=_MAX_FILES),
        newest_first=one_of(call, "order", ("desc", "asc")) == "desc",
        purpose=call.http.query_params.get("purpose"),
    )
    sizes = await sizes_of(repository, records)
    shown = list_view(list(map(file_view, records, sizes)), has_more=has_more)
    # Required strings in this list only, according to the specification.
    return JsonResponse({"first_id": "", "last_id": ""} | shown)


@ROUTES.add("GET", "/v1/files/{file_id}")
async def get_file(call: Call, file_id: str) -> Response:
    record = await call.files_api.file(call.key.owner, file_id)
    (size,) = await sizes_of(call.files_api.repository, [record])
    return JsonResponse(file_view(record, size))


@ROUTES.add("GET", "/v1/files/{file_id}/content")
async def get_content(call: Call, file_id: str) -> Response:
    """Return a file's bytes, or those from `Range: bytes=N-` on; for a running batch, the results so far."""
    record = await call.files_api.file(call.key.owner, file_id)
    content = await call.files_api.content(record)
    offset = first_byte(call)
    headers = {"content-disposition": f'attachment; filename="{_ascii(record.name)}"', "accept-ranges": "bytes"}
    if offset is not None and offset >= content.num_bytes:
        raise RangeNotSatisfiable(content.num_bytes)
    if offset is not None:
        headers["content-range"] = f"bytes {offset}-{content.num_bytes - 1}/{content.num_bytes}"
    start = offset or 0
    headers["content-length"] = str(content.num_bytes - start)
    return StreamingResponse(
        await _checked_stream(content.start_at(start), content.num_bytes - start),
        status_code=200 if offset is None else 206,
        media_type="application/octet-stream",
        headers=headers,
    )


@ROUTES.add("DELETE", "/v1/files/{file_id}")
async def delete_file(call: Call, file_id: str) -> Response:
    record = await call.files_api.remove(call.key.owner, file_id)
    return JsonResponse({"id": record.file_id, "object": "file", "deleted": True})


async def _checked_stream(chunks: AsyncIterator[bytes], num_bytes: int) -> AsyncIterator[bytes]:
    """Yield exactly `num_bytes`, after reading the first chunk: missing content becomes an error response while that is
    still possible. Later it closes the connection, so that no client takes a part for the whole."""
    first = await anext(chunks, b"")
    if num_bytes and not first:
        raise StorageDamaged("the content of this file is not there")

    async def stream() -> AsyncIterator[bytes]:
        chunk, num_left = first, num_bytes
        while chunk:
            yield chunk[:num_left]
            num_left -= min(num_left, len(chunk))
            chunk = await anext(chunks, b"") if num_left else b""
        if num_left:
            raise StorageDamaged(f"the last {num_left} bytes of a file that is being downloaded are not there")

    return stream()


def _ascii(name: str) -> str:
    return "".join(character if character.isascii() and character not in '"\\' else "_" for character in name)


@ROUTES.add("POST", "/v1/batches")
async def create_batch(call: Call) -> Response:
    """Create a batch; its lines are validated after the response."""
    files_api = call.files_api
    body = await read_body(call, partial(parse, CreateBatchRequest))
    key = call.http.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _MAX_IDEMPOTENCY_KEY_LEN:
        raise InvalidRequest(
            f"Idempotency-Key must have 1 to {_MAX_IDEMPOTENCY_KEY_LEN} characters.", param="Idempotency-Key"
        )
    return JsonResponse(batch_view(await files_api.create(call.key.owner, body, key)))


@ROUTES.add("GET", "/v1/batches")
async def list_batches(call: Call) -> Response:
    files_api, after = call.files_api, call.http.query_params.get("after")
    snapshots, has_more = await files_api.batches(call.key.owner, after=after, limit=_batches_of_page(call))
    return JsonResponse(list_view(list(map(batch_view, snapshots)), has_more=has_more))


@ROUTES.add("GET", "/v1/batches/limits")
async def get_limits(call: Call) -> Response:
    """Return the limits, so that clients can check a file before sending it. No batch id equals `limits`."""
    return JsonResponse(limits_view(call.files_api.config))


@ROUTES.add("GET", _BATCH)
async def get_batch(call: Call, batch_id: str) -> Response:
    return JsonResponse(batch_view(await call.files_api.batch(call.key.owner, batch_id)))


@ROUTES.add("POST", _BATCH + "/cancel")
async def cancel_batch(call: Call, batch_id: str) -> Response:
    """Cancel a batch; results so far are kept."""
    return JsonResponse(batch_view(await call.files_api.cancel(call.key.owner, batch_id)))


@ROUTES.add("POST", _BATCH + "/pause")
async def pause_batch(call: Call, batch_id: str) -> Response:
    """Start no more lines of a batch; those that run go on, and so does its window."""
    return JsonResponse(batch_view(await call.files_api.pause(call.key.owner, batch_id, is_paused=True)))


@ROUTES.add("POST", _BATCH + "/resume")
async def resume_batch(call: Call, batch_id: str) -> Response:
    return JsonResponse(batch_view(await call.files_api.pause(call.key.owner, batch_id, is_paused=False)))


@ROUTES.add("POST", _MESSAGES)
async def create_messages(call: Call) -> Response:
    batches = _messages_of(call)
    body = body_chunks(call, batches.files_api.config.max_file_bytes)
    return _message_batch(call, await batches.create(body, call.services, call.ignored))


@ROUTES.add("GET", _MESSAGES)
async def list_messages(call: Call) -> Response:
    batches, limit = _messages_of(call), _batches_of_page(call)
    after, before = call.http.query_params.get("after_id"), call.http.query_params.get("before_id")
    snapshots, has_more = await batches.page(after, before, limit=limit)
    shown = [message_batches.batch_view(snapshot, _results_url(call, snapshot)) for snapshot in snapshots]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return JsonResponse({"data": shown, "has_more": has_more, "first_id": first_id, "last_id": last_id})


@ROUTES.add("GET", _MESSAGES + "/{batch_id}")
async def get_messages(call: Call, batch_id: str) -> Response:
    batches = _messages_of(call)
    return _message_batch(call, await batches.files_api.batch(batches.owner, batch_id))


@ROUTES.add("DELETE", _MESSAGES + "/{batch_id}")
async def delete_messages(call: Call, batch_id: str) -> Response:
    return JsonResponse({"id": await _messages_of(call).remove(batch_id), "type": "message_batch_deleted"})


@ROUTES.add("GET", _MESSAGES + "/{batch_id}/results")
async def get_results(call: Call, batch_id: str) -> Response:
    batches = _messages_of(call)
    snapshot = await batches.files_api.batch(batches.owner, batch_id)
    return StreamingResponse(await batches.results(snapshot), media_type="application/x-jsonl")


@ROUTES.add("POST", _MESSAGES + "/{batch_id}/cancel")
async def cancel_messages(call: Call, batch_id: str) -> Response:
    batches = _messages_of(call)
    return _message_batch(call, await batches.files_api.cancel(batches.owner, batch_id))


def _batches_of_page(call: Call) -> int:
    return positive(call, "limit", default=_DEFAULT_BATCHES, at_most=_MAX_BATCHES)


def _messages_of(call: Call) -> MessageBatches:
    return MessageBatches(call.files_api, api_owner(call.key.owner, "messages"))


def _message_batch(call: Call, snapshot: BatchSnapshot) -> Response:
    return JsonResponse(message_batches.batch_view(snapshot, _results_url(call, snapshot)))


def _results_url(call: Call, snapshot: BatchSnapshot) -> str:
    """Return the address that the client's SDK follows with its key: over TLS where a proxy has it from there."""
    base = call.http.base_url
    if call.http.headers.get("x-forwarded-proto") == "https":
        base = base.replace(scheme="https")
    return f"{str(base).rstrip('/')}{_MESSAGES}/{snapshot.record.batch_id}/results"
