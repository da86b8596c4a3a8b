"""The gateway's errors, and the one table that maps every error to an HTTP response.

AlignedServeError
├── InvalidRequest              (core) the client's request is wrong
│   ├── Unauthorized            no valid API key
│   ├── Forbidden               this key may not ask for that (403)
│   ├── QuotaExceeded           this key asked too often (429: the client's quota)
│   ├── UnknownModel            a model that is not served here
│   ├── NotFound                no such file or batch, or one of another key
│   ├── Conflict                in use by something else now
│   ├── RangeNotSatisfiable     a range that begins behind a file's end
│   ├── BodyTooLarge            more bytes than the gateway reads
│   ├── BodyTooSlow             the body did not arrive in time
│   ├── WrongContentType        not JSON
│   └── ClientDisconnected      the client closed the connection
└── GenerationError             the cluster did not answer; the closed set that a CompletionBackend raises
    ├── Overloaded              no capacity now (503), with the time to retry after
    │   └── ResourceUnavailable     none for best effort (429)
    ├── Unavailable             no router, or a worker was lost
    ├── Unfetched               a picture that a request names by its URL could not be fetched now (502)
    ├── ServerDraining          it is about to end and takes nothing new
    ├── Unservable              can never fit this cluster
    │   └── GrammarFailed           no token can follow under its grammar
    ├── Loop                    a server behind this one leads back to it (508)
    ├── TimedOut                silent past its deadline
    └── GenerationFailed        an internal error"""

import math
from dataclasses import dataclass
from typing import NoReturn

import orjson

from alignedserve.core.errors import (
    AlignedServeError,
    ContextTooLong,
    InvalidRequest,
    StorageError,
    StorageFull,
    StoreFull,
)


class NeedsGateway(Exception):
    """Only the gateway can make the prompts of this body: they depend on more than the body."""


class Unauthorized(InvalidRequest):
    """No valid API key."""


class Forbidden(InvalidRequest):
    """A field asks for more than the client's key may."""


class QuotaExceeded(InvalidRequest):
    """This key asked too often, or for more than its limit will ever allow (`retry_after_s` is None)."""

    def __init__(self, message: str, *, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnknownModel(InvalidRequest):
    """A model that is not served here."""


class NotFound(InvalidRequest):
    """No such file or batch of this key."""


class Conflict(InvalidRequest):
    """Something else uses it now."""


class RangeNotSatisfiable(InvalidRequest):
    """A range that begins behind a file's end."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"The file has {num_bytes} bytes; there are none in this range.", param="Range")
        self.num_bytes = num_bytes


class BodyTooLarge(InvalidRequest):
    """More bytes than the gateway reads."""


class BodyTooSlow(InvalidRequest):
    """The body did not arrive in time."""


class WrongContentType(InvalidRequest):
    """The body is not declared as JSON."""


class ClientDisconnected(InvalidRequest):
    """The client closed the connection."""


class GenerationError(AlignedServeError):
    """The cluster did not answer. `retry_after_s` is set where retrying can help."""

    retry_after_s: float | None = None


class Overloaded(GenerationError):
    """No capacity now."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ResourceUnavailable(Overloaded):
    """No capacity for best effort now; real-time requests may have some."""


class Unavailable(GenerationError):
    """No router, or a worker was lost."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unfetched(GenerationError):
    """What a request names by its URL could not be fetched now."""

    retry_after_s = 1.0


class ServerDraining(GenerationError):
    """It is about to end and takes nothing new; another gateway, or the next process at this address, does."""

    retry_after_s = 5.0

    def __init__(self) -> None:
        super().__init__("The server is about to end and takes no new requests.")


class Unservable(GenerationError):
    """Can never fit this cluster."""


class GrammarFailed(Unservable):
    """No token can follow under the request's grammar."""

    param: str | None = None

    def named(self, path: str) -> "GrammarFailed":
        """Return the error as one of this field's value."""
        error = GrammarFailed(f"Invalid value for {path}: {self}.")
        error.param = path
        return error


class Loop(GenerationError):
    """A server behind this one leads back to it."""


class TimedOut(GenerationError):
    """Silent past its deadline."""


class GenerationFailed(GenerationError):
    """An internal error; the log of the process that noticed it has the details."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        """`reason`: in the words of that process, for operators; clients never see it."""
        super().__init__(message)
        self.reason = reason


def refuse(path: str, problem: str) -> NoReturn:
    """Raise InvalidRequest for the value of a field."""
    raise InvalidRequest(f"Invalid value for {path}: {problem}.", param=path, code="invalid_value")


def refuse_unknown(path: str) -> NoReturn:
    raise InvalidRequest(f"Unrecognized request argument: {path}.", param=path, code="unknown_parameter")


def refuse_missing(path: str) -> NoReturn:
    raise InvalidRequest(f"Missing required parameter: {path}.", param=path, code="missing_required_parameter")


def refuse_unsupported(path: str, value: object = None) -> NoReturn:
    """Raise InvalidRequest for a field, or for a value of it that clients may know: others are never repeated."""
    what = path if value is None else f"{path} {value!r}"
    raise InvalidRequest(f"{what} is not supported.", param=path, code="unsupported_parameter")


def named(path: str, error: InvalidRequest) -> InvalidRequest:
    """Return the error as one of this field's value."""
    return InvalidRequest(f"Invalid value for {path}: {error}.", param=path, code=error.code)


@dataclass(frozen=True, slots=True)
class HttpError:
    """HTTP status and OpenAI error type of one kind of error."""

    status: int
    kind: str  # OpenAI's error.type
    code: str | None = None  # OpenAI's error.code


# The first row whose type matches wins: subclasses stand before their base.
ERROR_TABLE: tuple[tuple[type[Exception], HttpError], ...] = (
    (Unauthorized, HttpError(401, "invalid_request_error", "invalid_api_key")),
    (Forbidden, HttpError(403, "invalid_request_error", "not_allowed")),
    (QuotaExceeded, HttpError(429, "rate_limit_error", "rate_limit_exceeded")),
    (UnknownModel, HttpError(404, "invalid_request_error", "model_not_found")),
    (NotFound, HttpError(404, "invalid_request_error", "not_found")),
    (Conflict, HttpError(409, "invalid_request_error", "conflict")),
    (RangeNotSatisfiable, HttpError(416, "invalid_request_error", "range_not_satisfiable")),
    (BodyTooLarge, HttpError(413, "invalid_request_error", "body_too_large")),
    (BodyTooSlow, HttpError(408, "invalid_request_error", "body_too_slow")),
    (WrongContentType, HttpError(415, "invalid_request_error", "unsupported_media_type")),
    (ClientDisconnected, HttpError(499, "invalid_request_error", "client_gone")),
    (ContextTooLong, HttpError(400, "invalid_request_error", "context_length_exceeded")),
    (InvalidRequest, HttpError(400, "invalid_request_error")),
    (ResourceUnavailable, HttpError(429, "server_error", "resource_unavailable")),
    (Overloaded, HttpError(503, "server_error", "overloaded")),
    (Unavailable, HttpError(503, "server_error", "unavailable")),
    (Unfetched, HttpError(502, "server_error", "fetch_failed")),
    (ServerDraining, HttpError(503, "server_error", "draining")),
    (Unservable, HttpError(400, "invalid_request_error", "unservable")),
    (Loop, HttpError(508, "server_error", "loop")),
    (TimedOut, HttpError(504, "server_error", "timeout")),
    (GenerationFailed, HttpError(500, "server_error", "generation_failed")),
    (StoreFull, HttpError(503, "server_error", "storage_full")),
    (StorageFull, HttpError(503, "server_error", "storage_full")),
    (StorageError, HttpError(503, "server_error", "storage_unavailable")),
)
INTERNAL_ERROR = HttpError(500, "server_error", "internal_error")
_UNNAMED = "invalid_request"
_DEFAULT_CODE = "invalid_value"  # of what a client asked, where the error does not say more
# Every label that `rejection_code` returns.
REJECTION_CODES = (*dict.fromkeys(row.code or _UNNAMED for _, row in ERROR_TABLE), INTERNAL_ERROR.code or _UNNAMED)
_STORAGE_RETRY_S = 2.0
_HIDDEN_MESSAGE = "The server had an error while processing the request."


def http_error_of(error: Exception) -> HttpError:
    """Return the table's row for this error; an error without one is internal."""
    return next((row for kind, row in ERROR_TABLE if isinstance(error, kind)), INTERNAL_ERROR)


def error_json(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return OpenAI's error object as JSON."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_body(error: Exception) -> bytes:
    """Return OpenAI's error object for this error."""
    row = http_error_of(error)
    code = getattr(error, "code", None) or row.code or _DEFAULT_CODE
    return error_json(error_message(error), row.kind, getattr(error, "param", None), code)


def error_message(error: Exception) -> str:
    return _HIDDEN_MESSAGE if http_error_of(error) is INTERNAL_ERROR else str(error)


def error_headers(error: Exception) -> dict[str, str]:
    """Return the headers of the response for this error, `Retry-After` among them where retrying can help."""
    headers: dict[str, str] = {}
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    if isinstance(error, StorageError):
        retry_after_s = _STORAGE_RETRY_S
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    elif isinstance(error, QuotaExceeded):
        headers["x-should-retry"] = "false"  # which OpenAI's and Anthropic's clients heed
    if isinstance(error, RangeNotSatisfiable):
        headers["Content-Range"] = f"bytes */{error.num_bytes}"
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def rejection_code(error: Exception) -> str:
    """Return the metrics label for this error, from a closed set."""
    row = http_error_of(error)
    return row.code or _UNNAMED
