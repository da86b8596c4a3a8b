"""The HTTP responses of every JSON endpoint, and of errors in the shapes of both APIs."""

from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope
from typing_extensions import override

from alignedserve.api.anthropic.message_format import anthropic_error_body, anthropic_status
from alignedserve.api.errors import error_body, error_headers, http_error_of

_ANTHROPIC_PATH = "/messages"
_ANTHROPIC_HEADER = "anthropic-version"


class JsonResponse(Response):
    """A response of JSON, encoded here unless it already is."""

    media_type = "application/json"

    @override
    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else orjson.dumps(content)


def error_response(error: Exception) -> Response:
    return JsonResponse(error_body(error), http_error_of(error).status, headers=error_headers(error))


def anthropic_error_response(error: Exception, request_id: str) -> Response:
    body = anthropic_error_body(error, request_id=request_id)
    return JsonResponse(body, anthropic_status(error), headers=error_headers(error))


def is_anthropic(scope: Scope) -> bool:
    """Return whether this request speaks Anthropic's API: by its path, or by the header that its clients send."""
    path = scope["path"].removeprefix("/v1")
    is_its_path = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
    return is_its_path or _ANTHROPIC_HEADER in Headers(scope=scope)
