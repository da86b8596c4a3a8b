"""Routes of /v1/files: upload, list, get, content, delete."""

from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from alignedserve.api.errors import RangeNotSatisfiable
from alignedserve.core.errors import StorageDamaged
from alignedserve.gateway.files.file_lists import list_files, sizes_of
from alignedserve.gateway.files.files_api import new_file_id
from alignedserve.gateway.files.uploads import receive_upload
from alignedserve.gateway.files.views import file_view, list_view
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.routes.dependencies import files_api_of
from alignedserve.gateway.routes.request_parameters import first_byte, one_of, positive

router = APIRouter()

_MAX_LIMIT = 10_000


@router.post("/v1/files", response_model=None)
async def create_file(http: Request) -> Response:
    """Upload a file."""
    files_api, owner = await files_api_of(http)
    file_id, most = new_file_id(), files_api.config.max_file_bytes
    async with files_api.arriving(owner) as take:
        upload = await receive_upload(http, files_api.stores.blobs, file_id, most, take)
    try:
        record = await files_api.add_file(owner, file_id, upload)
    finally:
        await upload.blob.discard()
    return JsonResponse(file_view(record, record.num_bytes))


@router.get("/v1/files", response_model=None)
async def list_of_files(http: Request) -> Response:
    """List the files of the caller, a page at a time."""
    files_api, owner = await files_api_of(http)
    records, has_more = await list_files(
        files_api.repository,
        owner,
        after=http.query_params.get("after"),
        limit=positive(http, "limit", default=_MAX_LIMIT, at_most=_MAX_LIMIT),
        newest_first=one_of(http, "order", ("desc", "asc")) == "desc",
        purpose=http.query_params.get("purpose"),
    )
    sizes = await sizes_of(files_api.repository, records)
    shown = list_view([file_view(*one) for one in zip(records, sizes, strict=True)], has_more=has_more)
    # Required strings in this list only, according to the specification.
    return JsonResponse({"first_id": "", "last_id": ""} | shown)


@router.get("/v1/files/{file_id}", response_model=None)
async def get_file(http: Request, file_id: str) -> Response:
    """Return a file's metadata."""
    files_api, owner = await files_api_of(http)
    record = await files_api.file(owner, file_id)
    (size,) = await sizes_of(files_api.repository, [record])
    return JsonResponse(file_view(record, size))


@router.get("/v1/files/{file_id}/content", response_model=None)
async def get_content(http: Request, file_id: str) -> Response:
    """Return a file's bytes, or those from `Range: bytes=N-` on; for a running batch, the results so far."""
    files_api, owner = await files_api_of(http)
    record = await files_api.file(owner, file_id)
    content = await files_api.content(record)
    offset = first_byte(http)
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


@router.delete("/v1/files/{file_id}", response_model=None)
async def delete_file(http: Request, file_id: str) -> Response:
    """Delete a file."""
    files_api, owner = await files_api_of(http)
    record = await files_api.remove(owner, file_id)
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
