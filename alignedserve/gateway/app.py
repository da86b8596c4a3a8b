"""Builds the ASGI app: routes, middleware, errors of unknown paths. Nothing here starts or stops anything."""

import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from alignedserve.api.anthropic.message_format import error_view
from alignedserve.api.errors import error_json
from alignedserve.gateway.call import Call
from alignedserve.gateway.json_response import JsonResponse
from alignedserve.gateway.middleware import GatewayMiddleware, HeadMiddleware
from alignedserve.gateway.quotas import LIMIT_HEADERS
from alignedserve.gateway.routes import files, generate, live, models, monitoring, responses
from alignedserve.gateway.services import Services

_ROUTES = [route for module in (generate, responses, models, files, monitoring, live) for route in module.ROUTES]
_MAX_ECHOED_PATH_LEN = 120
_READABLE_HEADERS = ("x-request-id", "request-id", "x-alignedserve-ignored-fields", "retry-after", *LIMIT_HEADERS)


def build_app(services: Services) -> FastAPI:
    app = FastAPI(
        routes=_ROUTES,
        exception_handlers={HTTPException: _http_exception},
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(GatewayMiddleware, services=services)
    app.add_middleware(HeadMiddleware)
    if services.config.cors_origins:
        _allow_origins(app, services.config.cors_origins)
    return app


def _allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_READABLE_HEADERS,
    )


async def _http_exception(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for HTTPException only"
    path = http.url.path[:_MAX_ECHOED_PATH_LEN]
    if error.status_code == 405:
        message = f"Not allowed to {http.method} on {path}."
    else:
        message = f"Invalid URL ({http.method} {path}).{_meant(http)}"
    code = "method_not_allowed" if error.status_code == 405 else "unknown_url"
    call = Call.of(http.scope)
    if call.is_anthropic:
        body: Any = error_view(message, error.status_code, call.request_id)
    else:
        body = error_json(message, "invalid_request_error", code=code)
    headers = (
        {"Allow": ", ".join(sorted({method for route in _routes_at(http.scope) for method in route.methods or ()}))}
        if error.status_code == 405
        else error.headers
    )
    return JsonResponse(body, error.status_code, headers=headers)


def _meant(http: Request) -> str:
    plain = re.sub("/{2,}", "/", http.url.path).rstrip("/")
    paths = (plain, plain.removeprefix("/v1"), f"/v1{plain}")
    meant = next((path for path in paths if _routes_at({**http.scope, "path": path})), None)
    if meant is None:
        return ""
    return f" Did you mean {meant[:_MAX_ECHOED_PATH_LEN]}? Look at the base URL of your client."


def _routes_at(scope: Scope) -> list[Route]:
    return [route for route in _ROUTES if route.matches(scope)[0] is not Match.NONE]
