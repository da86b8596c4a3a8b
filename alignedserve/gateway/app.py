"""Builds the ASGI app from explicit arguments. Nothing here starts or stops anything."""

import time
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.api_keys import ApiKeys
from alignedserve.gateway.backend.interface import CompletionBackend
from alignedserve.gateway.backend.readiness_probe import ReadinessProbe
from alignedserve.gateway.errors import JSON_TYPE, error_body
from alignedserve.gateway.files.files_api import FilesApi
from alignedserve.gateway.metrics.gateway_metrics import GatewayMetrics
from alignedserve.gateway.middleware import GatewayMiddleware
from alignedserve.gateway.model_card import ModelCard
from alignedserve.gateway.routes import batches, files, generate, health, models, page, tokens
from alignedserve.gateway.services import Capacity, Services
from alignedserve.runtime.model.tokenizer import Tokenizer

_MAX_ECHOED_PATH_LEN = 120


def build_services(
    *,
    backend: CompletionBackend,
    tokenizer: Tokenizer,
    model: ModelCard,
    config: GatewayConfig,
    api_keys: Sequence[str] = (),
    reply_to: str = "",
    files_api: FilesApi | None = None,
) -> Services:
    """Everything that the routes share."""
    canary_token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else 0
    return Services(
        backend=backend,
        tokenizer=tokenizer,
        model=model,
        config=config,
        reply_to=reply_to,
        keys=ApiKeys(api_keys, requests_per_minute=config.requests_per_minute, clock=time.monotonic),
        metrics=GatewayMetrics(model.name, backend.status),
        capacity=Capacity(config.max_concurrent_requests),
        canary=ReadinessProbe(backend, token_id=canary_token, reply_to=reply_to),
        files_api=files_api,
    )


def build_app(services: Services) -> FastAPI:
    """The whole HTTP side."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.services = services
    for module in (generate, models, tokens, files, batches, health, page):
        app.include_router(module.router)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_middleware(GatewayMiddleware, keys=services.keys, metrics=services.metrics)
    return app


async def _http_exception(http: Request, error: Exception) -> Response:
    """404 and 405 in OpenAI's shape."""
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    path = http.url.path[:_MAX_ECHOED_PATH_LEN]
    if error.status_code == 405:
        message = f"Not allowed to {http.method} on {path}."
    else:
        message = f"Invalid URL ({http.method} {path})."
    code = "method_not_allowed" if error.status_code == 405 else "unknown_url"
    body = error_body(message, "invalid_request_error", code=code)
    return Response(body, error.status_code, headers=error.headers, media_type=JSON_TYPE)
