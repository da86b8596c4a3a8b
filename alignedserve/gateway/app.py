"""Builds the ASGI app: routes, middleware, errors of unknown paths. Nothing here starts or stops anything."""

import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from alignedserve.api.anthropic.message_format import error_view
from alignedserve.api.errors import error_json
from alignedserve.gateway.connections.arriving_bodies import ArrivingBodies
from alignedserve.gateway.connections.limits import ConnectionLimits
from alignedserve.gateway.json_response import JsonResponse, is_anthropic
from alignedserve.gateway.middleware import GatewayMiddleware, HeadMiddleware
from alignedserve.gateway.routes import (
    adapters,
    batches,
    conversations,
    files,
    generate,
    health,
    live,
    message_batches,
    models,
    responses,
    usage,
)
from alignedserve.gateway.services import Services
from alignedserve.gateway.shown_limits import LIMIT_HEADERS

_ROUTERS = tuple(
    module.router
    for module in (
        generate,
        responses,
        conversations,
        message_batches,
        models,
        adapters,
        files,
        batches,
        health,
        live,
        usage,
    )
)
_MAX_ECHOED_PATH_LEN = 120
_READABLE_HEADERS = ("x-request-id", "request-id", "x-alignedserve-ignored-fields", "retry-after", *LIMIT_HEADERS)


def build_app(services: Services) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.state.services = services
    for router in _ROUTERS:
        app.include_router(router)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_middleware(
        GatewayMiddleware,
        api_keys=services.api_keys,
        metrics=services.metrics,
        intake=services.intake,
        bodies=ArrivingBodies(ConnectionLimits.of(services.config).max_connections, services.config.max_body_bytes),
        logs_access=services.config.access_log,
    )
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
    if is_anthropic(http.scope):
        body: Any = error_view(message, error.status_code, http.state.request_id)
    else:
        body = error_json(message, "invalid_request_error", code=code)
    headers = {"Allow": ", ".join(_methods_of(http))} if error.status_code == 405 else error.headers
    return JsonResponse(body, error.status_code, headers=headers)


def _methods_of(http: Request) -> list[str]:
    methods = {method for route in _routes_at(http.scope) for method in getattr(route, "methods", None) or ()}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def _meant(http: Request) -> str:
    plain = re.sub("/{2,}", "/", http.url.path).rstrip("/")
    paths = (plain, plain.removeprefix("/v1"), f"/v1{plain}")
    meant = next((path for path in paths if _routes_at({**http.scope, "path": path})), None)
    if meant is None:
        return ""
    return f" Did you mean {meant[:_MAX_ECHOED_PATH_LEN]}? Look at the base URL of your client."


def _routes_at(scope: Scope) -> list[BaseRoute]:
    routes = [route for router in _ROUTERS for route in router.routes]
    return [route for route in routes if route.matches(scope)[0] is not Match.NONE]
