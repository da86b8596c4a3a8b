"""GET /health, /ready, /metrics and /version."""

from functools import partial
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.api.errors import error_json
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.routes.dependencies import overseen_services, services_of
from alignedserve.gateway.storage_metrics import batch_metrics

router = APIRouter()


@router.get("/health", response_model=None)
async def health() -> Response:
    """Report that the gateway is alive, whatever the rest of the cluster does."""
    return JsonResponse({"status": "alive"})


@router.get("/ready", response_model=None)
async def ready(http: Request) -> Response:
    """Report whether every model generates tokens; 503 with the reason when one does not."""
    readiness = services_of(http).readiness
    missing = readiness.missing()
    if missing is None:
        return JsonResponse({"status": "ready"})
    code = "model_fails" if readiness.is_hopeless else "not_ready"
    body = error_json(f"Not ready: {missing}.", "server_error", code=code)
    return JsonResponse(body, 503, headers={"Retry-After": "1"})


@router.get("/metrics", response_model=None)
async def metrics(http: Request) -> Response:
    """Return the metrics that Prometheus scrapes, to a key that may see what all keys use."""
    services = overseen_services(http)
    text = await services.lanes.report(partial(services.metrics.collected().render, services.own_labels))
    text += await services.disks.metrics()
    if services.files_api is not None:
        text += batch_metrics(await services.files_api.totals.read(services.files_api.repository))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/version", response_model=None)
async def get_version() -> Response:
    """Return the version of AlignedServe."""
    return JsonResponse({"version": _VERSION})


def _installed_version() -> str:
    try:
        return version("alignedserve")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


_VERSION = _installed_version()
