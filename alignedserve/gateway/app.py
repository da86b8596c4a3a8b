"""Builds the ASGI app: routes, middleware, errors of unknown paths. Nothing here starts or stops anything."""

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from alignedserve.gateway.anthropic.errors import error_view, is_anthropic
from alignedserve.gateway.errors import error_json
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.middleware import GatewayMiddleware
from alignedserve.gateway.routes import (
    batches,
    embeddings,
    files,
    generate,
    health,
    message_batches,
    messages,
    models,
    page,
    responses,
    tokens,
)
from alignedserve.gateway.services import Services

_MAX_ECHOED_PATH_LEN = 120


def build_app(services: Services) -> FastAPI:
    """Build the HTTP side over these services."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.services = services
    for module in (
        generate,
        responses,
        messages,
        message_batches,
        embeddings,
        models,
        tokens,
        files,
        batches,
        health,
        page,
    ):
        app.include_router(module.router)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_middleware(GatewayMiddleware, api_keys=services.api_keys, metrics=services.metrics)
    return app


async def _http_exception(http: Request, error: Exception) -> Response:
    """Return 404 and 405."""
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    path = http.url.path[:_MAX_ECHOED_PATH_LEN]
    if error.status_code == 405:
        message = f"Not allowed to {http.method} on {path}."
    else:
        message = f"Invalid URL ({http.method} {path})."
    code = "method_not_allowed" if error.status_code == 405 else "unknown_url"
    if is_anthropic(http.scope):
        body: Any = error_view(message, error.status_code, http.state.request_id)
    else:
        body = error_json(message, "invalid_request_error", code=code)
    return JsonResponse(body, error.status_code, headers=error.headers)
