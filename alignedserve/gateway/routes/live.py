"""GET /dashboard, the live page, and GET /v1/alignedserve/live, which it and `alignedserve top` read."""

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.batches.records import BatchTotals
from alignedserve.core.errors import StorageError
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.live.view import live_view
from alignedserve.gateway.routes.dependencies import services_of
from alignedserve.gateway.routes.html_pages import HtmlPage
from alignedserve.gateway.services import Services

router = APIRouter()
_DASHBOARD = HtmlPage.load("live/dashboard.html")


@router.get("/dashboard", response_model=None)
async def dashboard() -> Response:
    """Return the live page, which asks for a key where one is needed."""
    return _DASHBOARD.response()


@router.get("/v1/alignedserve/live", response_model=None)
async def live(http: Request) -> Response:
    """Return what the cluster does at this moment."""
    services = services_of(http)
    document = live_view(services, await _batch_totals(services), time.monotonic())
    return JsonResponse(document, headers={"Cache-Control": "no-store"})


async def _batch_totals(services: Services) -> BatchTotals | None:
    if services.files_api is None:
        return None
    try:
        return await services.files_api.repository.totals()
    except StorageError:
        return None
