"""Logs of requests: a line for each that was answered or left, lines of failures, and bodies without secrets.

A redacted body keeps its shape, its numbers and the words that the API itself gives meaning to; of what people wrote
there is the length. A full body still lacks what looks like a key or stands under such a name.
"""

import logging
import re
import time
from collections.abc import Callable
from typing import Any

import orjson
from starlette.datastructures import Headers

from alignedserve.api.errors import INTERNAL_ERROR, ClientDisconnected, http_error_of
from alignedserve.config.sections import GatewayConfig
from alignedserve.config.sections.gateway import FULL_BODIES, NO_BODIES
from alignedserve.gateway.call import Call
from alignedserve.process.logs import FIELDS

access_logger = logging.getLogger("alignedserve.access")
body_logger = logging.getLogger("alignedserve.requests")
logger = logging.getLogger(__name__)

_MAX_PATH_LEN = 200
MAX_LINES = 20  # of one status, in so long:
PERIOD_S = 60.0
LONGEST_LOGGED = 256 * 1024  # bytes of a body that is looked into, on the gateway's own loop
_MAX_ITEMS = 64  # of a list
_MAX_DEPTH = 12
_API_WORDS = frozenset(
    {"model", "role", "type", "object", "service_tier", "reasoning_effort", "tool_choice", "encoding_format", "effort"}
)
_SECRET_NAME = re.compile(r"api[-_]?key|authorization|passw|secret|credential|(access|auth|refresh)[-_]?token", re.I)
_SECRET_TEXT = re.compile(r"\b(?:sk|pk|rk|as|hf|ghp|gho|xox[abp]|AKIA|eyJ)[-_]?[A-Za-z0-9_-]{16,}|\bBearer\s+\S+", re.I)
_SECRET = "<secret>"  # noqa: S105


def log_access(call: Call, elapsed_s: float) -> None:
    scope, key = call.http.scope, call.known_key
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": _printable(scope["path"]),
        "status": call.status if call.status is not None else "client_gone",
        "ms": round(elapsed_s * 1000.0, 1),
        "bytes": call.num_bytes,
        "request_id": call.request_id,
    }
    if call.client_id is not None:
        fields["client_id"] = call.client_id
    if key is not None and key.name:
        fields["key"] = key.name
    if call.generation is not None:
        request = call.generation.request
        fields |= {
            "model": request.model,
            "class": request.requests[0].request_class.name.lower(),
            "prompt_tokens": request.num_prompt_tokens,
            "completion_tokens": call.generation.num_generated_tokens,
        }
    words = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("method", "path"))
    access_logger.info("%s %s %s", fields["method"], fields["path"], words, extra={FIELDS: fields})


def _printable(path: str) -> str:
    shown = path[:_MAX_PATH_LEN]
    return "".join(character if character.isprintable() and character != " " else "?" for character in shown)


class FailureLog:
    """Logs requests that fail: some a minute of each status, as anyone at the port can make any number fail."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: dict[int, float] = {}  # by status, as below: when its first line of this period was written
        self._num_failed: dict[int, int] = {}  # since then

    def note(self, request_id: str, path: str, error: Exception) -> None:
        """Note one failed request: a line, with a traceback only for internal errors."""
        row = http_error_of(error)
        if not self._has_line(row.status):
            return
        if row is INTERNAL_ERROR:
            logger.error("request %s failed: %s", request_id, type(error).__name__, exc_info=error)
        elif isinstance(error, ClientDisconnected):
            logger.info("request %s aborted: %s", request_id, error)
        else:
            # As a literal: the words may come from a chat template, and must not forge a line.
            logger.warning("request %s to %.80r failed with %d: %.300r", request_id, path, row.status, str(error))

    def _has_line(self, status: int) -> bool:
        now, num_failed = self._clock(), self._num_failed.get(status, 0)
        if now - self._began_s.get(status, -PERIOD_S) >= PERIOD_S:
            if num_failed > MAX_LINES:
                logger.warning("%d more requests failed with %d, without lines here", num_failed - MAX_LINES, status)
            self._began_s[status], num_failed = now, 0
        self._num_failed[status] = num_failed + 1
        return num_failed < MAX_LINES


def log_body(raw: bytes, headers: Headers, config: GatewayConfig, num_bytes: int | None = None) -> None:
    """Log a body as the configuration says. `num_bytes`: of the whole, where this is its beginning."""
    if config.request_log == NO_BODIES:
        return
    shown = shown_body(raw, _presented_keys(headers), config)
    size = len(raw) if num_bytes is None else num_bytes
    body_logger.info("body of %d bytes: %s", size, shown, extra={FIELDS: {"body": shown, "body_bytes": size}})


def shown_body(raw: bytes, keys: tuple[str, ...], config: GatewayConfig) -> str:
    """Return what is logged of a body. `keys`: what the client has presented, of which nothing is shown."""
    if len(raw) > LONGEST_LOGGED:
        return f"<longer than {LONGEST_LOGGED} bytes>"
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return "<not JSON>"
    shown = _shown(body, "", config.request_log == FULL_BODIES, 0)
    text = orjson.dumps(shown, default=str).decode(errors="replace")
    for key in keys:
        text = text.replace(key, _SECRET)
    limit = config.max_request_log_bytes
    return text if len(text) <= limit else f"{text[:limit]}…"


def _shown(value: Any, name: str, is_full: bool, depth: int) -> Any:
    if _SECRET_NAME.search(name):
        return _SECRET
    if depth > _MAX_DEPTH:
        return "<deeper>"
    if isinstance(value, dict):
        fields = list(value.items())[:_MAX_ITEMS]
        return {_label(key, is_full): _shown(item, key, is_full, depth + 1) for key, item in fields}
    if isinstance(value, list):
        if value and not is_full and all(type(item) is int for item in value[:_MAX_ITEMS]):
            return f"<{len(value)} numbers>"  # such as a prompt's tokens, which are its text
        shown = [_shown(item, name, is_full, depth + 1) for item in value[:_MAX_ITEMS]]
        return shown if len(value) <= _MAX_ITEMS else [*shown, f"<{len(value) - _MAX_ITEMS} more>"]
    if not isinstance(value, str):
        return value
    if is_full or (name in _API_WORDS and len(value) <= 100):
        return _SECRET_TEXT.sub(_SECRET, value)
    return f"<{len(value)} characters>"


def _label(key: str, is_full: bool) -> str:
    return _SECRET_TEXT.sub(_SECRET, key) if is_full or len(key) <= 40 else f"<{len(key)} characters>"


def _presented_keys(headers: Headers) -> tuple[str, ...]:
    presented = (headers.get("authorization", "").rpartition(" ")[2], headers.get("x-api-key", ""))
    return tuple(key for key in presented if len(key) >= 4)
