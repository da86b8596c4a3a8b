"""Errors in the shape of Anthropic's API."""

from typing import Any

import orjson

from alignedserve.api.errors import Overloaded, error_message, http_error_of

# The one code that clients act on: they go on without a thread, and send the whole conversation.
THREAD_UNSUPPORTED = "thread_unsupported_request"
_OVERLOADED_STATUS = 529
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED_STATUS: "overloaded_error",
}


def anthropic_error_body(error: Exception, *, request_id: str) -> bytes:
    """Return the error object for this error. There is no member for the field to blame: the message names it."""
    message, param = error_message(error), getattr(error, "param", None)
    if param is not None and param not in message:
        message = f"{param}: {message}"
    view = error_view(message, anthropic_status(error), request_id)
    if getattr(error, "code", None) == THREAD_UNSUPPORTED:
        view["error"]["details"] = {"error_code": THREAD_UNSUPPORTED}
    return orjson.dumps(view)


def error_view(message: str, status: int, request_id: str | None) -> dict[str, Any]:
    """Return the error object of a response with this status."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def anthropic_status(error: Exception) -> int:
    """Return the HTTP status of the response for this error."""
    return _OVERLOADED_STATUS if isinstance(error, Overloaded) else http_error_of(error).status
