"""GET /v1/alignedserve/requests/{id}: the course of a request, for the key that made it."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.errors import NotFound
from alignedserve.api.timelines.request_ids import plain_request_id
from alignedserve.gateway.routes.dependencies import rate_limited_services

router = APIRouter()


@router.get("/v1/alignedserve/requests/{wanted}", response_model=None)
async def explain(http: Request, wanted: str) -> Response:
    """Explain a request by the id of its response, or by the client's own, at whichever gateway it was made."""
    services = await rate_limited_services(http)
    document = None
    if plain_request_id(wanted) is not None:
        document = await services.questions.explain(wanted, services.api_keys.owner(http.state.key_number))
    if document is None:
        raise NotFound("There is no such request, or it ended too long ago.", code="request_not_found")
    return Response(document, media_type="application/json", headers={"cache-control": "no-store"})
