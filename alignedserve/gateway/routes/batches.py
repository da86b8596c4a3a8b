"""/v1/batches: create, list, get, cancel."""

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.batches.repository import BatchSnapshot
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.errors import JSON_TYPE
from alignedserve.gateway.files.schemas import CreateBatchRequest
from alignedserve.gateway.files.views import batch_view, limits_view, list_view
from alignedserve.gateway.openai.parsing import parse, read_json
from alignedserve.gateway.routes.dependencies import files_api_of, services_of
from alignedserve.gateway.routes.query_parameters import positive

router = APIRouter()

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_MAX_AGAIN_LEN = 255


@router.post("/v1/batches", response_model=None)
async def create_batch(http: Request) -> Response:
    """Accept a batch; its lines are validated behind the answer."""
    desk, owner = files_api_of(http)
    asked = parse(CreateBatchRequest, await read_json(http, services_of(http).config))
    return _json(await desk.create(owner, asked, _again(http)))


@router.get("/v1/batches", response_model=None)
async def list_batches(http: Request) -> Response:
    """A page of one's batches, newest first."""
    desk, owner = files_api_of(http)
    limit = positive(http, "limit", default=_DEFAULT_LIMIT, at_most=_MAX_LIMIT)
    sights, has_more = await desk.batches(owner, after=http.query_params.get("after"), limit=limit)
    shown = list_view([batch_view(sight) for sight in sights], has_more=has_more)
    return Response(orjson.dumps(shown), media_type=JSON_TYPE)


@router.get("/v1/batches/limits", response_model=None)
async def get_limits(http: Request) -> Response:
    """What is accepted here, for whoever wants to check a file before sending it. No batch has such an id."""
    desk, _ = files_api_of(http)
    return Response(orjson.dumps(limits_view(desk.config)), media_type=JSON_TYPE)


@router.get("/v1/batches/{batch_id}", response_model=None)
async def get_batch(http: Request, batch_id: str) -> Response:
    """A batch as it is now."""
    desk, owner = files_api_of(http)
    return _json(await desk.batch(owner, batch_id))


@router.post("/v1/batches/{batch_id}/cancel", response_model=None)
async def cancel_batch(http: Request, batch_id: str) -> Response:
    """End a batch; what is done is kept."""
    desk, owner = files_api_of(http)
    return _json(await desk.cancel(owner, batch_id))


def _again(http: Request) -> str | None:
    key = http.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _MAX_AGAIN_LEN:
        raise InvalidRequest(f"Idempotency-Key must have 1 to {_MAX_AGAIN_LEN} characters.", param="Idempotency-Key")
    return key


def _json(sight: BatchSnapshot) -> Response:
    return Response(orjson.dumps(batch_view(sight)), media_type=JSON_TYPE)
