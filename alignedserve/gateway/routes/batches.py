"""Routes of /v1/batches: create, list, get, cancel, pause, resume."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.openai.parsing import parse
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.files.schemas import CreateBatchRequest
from alignedserve.gateway.files.views import batch_view, limits_view, list_view
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.routes.dependencies import files_api_of, services_of
from alignedserve.gateway.routes.request_bodies import read_body
from alignedserve.gateway.routes.request_parameters import positive

router = APIRouter()

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_MAX_IDEMPOTENCY_KEY_LEN = 255


@router.post("/v1/batches", response_model=None)
async def create_batch(http: Request) -> Response:
    """Create a batch; its lines are validated after the response."""
    files_api, owner = await files_api_of(http)
    body = await read_body(http, services_of(http), partial(parse, CreateBatchRequest))
    return JsonResponse(batch_view(await files_api.create(owner, body, _idempotency_key(http))))


@router.get("/v1/batches", response_model=None)
async def list_batches(http: Request) -> Response:
    """List the batches of the caller, newest first, a page at a time."""
    files_api, owner = await files_api_of(http)
    limit = positive(http, "limit", default=_DEFAULT_LIMIT, at_most=_MAX_LIMIT)
    snapshots, has_more = await files_api.batches(owner, after=http.query_params.get("after"), limit=limit)
    shown = list_view([batch_view(snapshot) for snapshot in snapshots], has_more=has_more)
    return JsonResponse(shown)


@router.get("/v1/batches/limits", response_model=None)
async def get_limits(http: Request) -> Response:
    """Return the limits, so that clients can check a file before sending it. No batch id equals `limits`."""
    files_api, _ = await files_api_of(http)
    return JsonResponse(limits_view(files_api.config))


@router.get("/v1/batches/{batch_id}", response_model=None)
async def get_batch(http: Request, batch_id: str) -> Response:
    """Return a batch."""
    files_api, owner = await files_api_of(http)
    return JsonResponse(batch_view(await files_api.batch(owner, batch_id)))


@router.post("/v1/batches/{batch_id}/cancel", response_model=None)
async def cancel_batch(http: Request, batch_id: str) -> Response:
    """Cancel a batch; results so far are kept."""
    files_api, owner = await files_api_of(http)
    return JsonResponse(batch_view(await files_api.cancel(owner, batch_id)))


@router.post("/v1/batches/{batch_id}/pause", response_model=None)
async def pause_batch(http: Request, batch_id: str) -> Response:
    """Start no more lines of a batch; those that run go on, and so does its window."""
    files_api, owner = await files_api_of(http)
    return JsonResponse(batch_view(await files_api.pause(owner, batch_id, is_paused=True)))


@router.post("/v1/batches/{batch_id}/resume", response_model=None)
async def resume_batch(http: Request, batch_id: str) -> Response:
    """Start lines of a paused batch again."""
    files_api, owner = await files_api_of(http)
    return JsonResponse(batch_view(await files_api.pause(owner, batch_id, is_paused=False)))


def _idempotency_key(http: Request) -> str | None:
    key = http.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _MAX_IDEMPOTENCY_KEY_LEN:
        raise InvalidRequest(
            f"Idempotency-Key must have 1 to {_MAX_IDEMPOTENCY_KEY_LEN} characters.", param="Idempotency-Key"
        )
    return key
