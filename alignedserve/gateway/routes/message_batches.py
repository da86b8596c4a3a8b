"""Routes of /v1/messages/batches: create, list, get, delete, results, cancel."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from alignedserve.batches.records import api_owner
from alignedserve.batches.repository import BatchSnapshot
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.message_batches import MessageBatches, batch_view
from alignedserve.gateway.routes.dependencies import files_api_of, ignored_fields_of, services_of
from alignedserve.gateway.routes.request_bodies import body_chunks
from alignedserve.gateway.routes.request_parameters import positive

router = APIRouter()

_PATH = "/v1/messages/batches"
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


@router.post(_PATH, response_model=None)
async def create_batch(http: Request) -> Response:
    """Create a batch of messages."""
    batches, services = await _batches_of(http), services_of(http)
    body = body_chunks(http, services.config, batches.files_api.config.max_file_bytes)
    return _shown(http, await batches.create(body, services, ignored_fields_of(http)))


@router.get(_PATH, response_model=None)
async def list_batches(http: Request) -> Response:
    """List the message batches of the caller, newest first, a page at a time."""
    batches = await _batches_of(http)
    limit = positive(http, "limit", default=_DEFAULT_LIMIT, at_most=_MAX_LIMIT)
    after, before = http.query_params.get("after_id"), http.query_params.get("before_id")
    snapshots, has_more = await batches.page(after, before, limit=limit)
    shown = [batch_view(snapshot, _results_url(http, snapshot)) for snapshot in snapshots]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return JsonResponse({"data": shown, "has_more": has_more, "first_id": first_id, "last_id": last_id})


@router.get(_PATH + "/{batch_id}", response_model=None)
async def get_batch(http: Request, batch_id: str) -> Response:
    """Return a batch."""
    batches = await _batches_of(http)
    return _shown(http, await batches.files_api.batch(batches.owner, batch_id))


@router.delete(_PATH + "/{batch_id}", response_model=None)
async def delete_batch(http: Request, batch_id: str) -> Response:
    """Delete a batch that is over, and its results."""
    batches = await _batches_of(http)
    return JsonResponse({"id": await batches.remove(batch_id), "type": "message_batch_deleted"})


@router.get(_PATH + "/{batch_id}/results", response_model=None)
async def get_results(http: Request, batch_id: str) -> Response:
    """Return the results of a batch that is over, one on each line."""
    batches = await _batches_of(http)
    snapshot = await batches.files_api.batch(batches.owner, batch_id)
    return StreamingResponse(await batches.results(snapshot), media_type="application/x-jsonl")


@router.post(_PATH + "/{batch_id}/cancel", response_model=None)
async def cancel_batch(http: Request, batch_id: str) -> Response:
    """Cancel a batch; results so far are kept."""
    batches = await _batches_of(http)
    return _shown(http, await batches.files_api.cancel(batches.owner, batch_id))


async def _batches_of(http: Request) -> MessageBatches:
    files_api, client = await files_api_of(http)
    return MessageBatches(files_api, api_owner(client, "messages"))


def _shown(http: Request, snapshot: BatchSnapshot) -> Response:
    return JsonResponse(batch_view(snapshot, _results_url(http, snapshot)))


def _results_url(http: Request, snapshot: BatchSnapshot) -> str:
    """Return the address that the client's SDK follows with its key: over TLS where a proxy has it from there."""
    base = http.base_url
    if http.headers.get("x-forwarded-proto") == "https":
        base = base.replace(scheme="https")
    return f"{str(base).rstrip('/')}{_PATH}/{snapshot.record.batch_id}/results"
