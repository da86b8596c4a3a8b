"""The request log: bodies, where the operator has asked for them, and never a secret.

Redacted, a body keeps its shape, its numbers and the words that the API itself gives meaning to; what people have
written is there by its length. In full, what looks like a key or stands under such a name is left out all the same.
"""

import logging
import re
from typing import Any

import orjson
from starlette.datastructures import Headers

from alignedserve.config.sections import GatewayConfig
from alignedserve.config.sections.gateway import FULL_BODIES, NO_BODIES
from alignedserve.process.logs import FIELDS

logger = logging.getLogger("alignedserve.requests")

LONGEST_LOGGED = 256 * 1024  # bytes of a body that is looked into, on the gateway's own loop
_MAX_ITEMS = 64  # of a list
_MAX_DEPTH = 12
_OWN_WORDS = frozenset(
    {"model", "role", "type", "object", "service_tier", "reasoning_effort", "tool_choice", "encoding_format", "effort"}
)
_SECRET_NAME = re.compile(r"api[-_]?key|authorization|passw|secret|credential|(access|auth|refresh)[-_]?token", re.I)
_SECRET_TEXT = re.compile(r"\b(?:sk|pk|rk|as|hf|ghp|gho|xox[abp]|AKIA|eyJ)[-_]?[A-Za-z0-9_-]{16,}|\bBearer\s+\S+", re.I)
_SECRET = "<secret>"  # noqa: S105


def log_body(raw: bytes, headers: Headers, config: GatewayConfig, num_bytes: int | None = None) -> None:
    """Log a body as the configuration says. `num_bytes`: of the whole, where this is its beginning."""
    if config.request_log == NO_BODIES:
        return
    shown = shown_body(raw, _presented_keys(headers), config)
    size = len(raw) if num_bytes is None else num_bytes
    logger.info("body of %d bytes: %s", size, shown, extra={FIELDS: {"body": shown, "body_bytes": size}})


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
    if is_full or (name in _OWN_WORDS and len(value) <= 100):
        return _SECRET_TEXT.sub(_SECRET, value)
    return f"<{len(value)} characters>"


def _label(key: str, is_full: bool) -> str:
    return _SECRET_TEXT.sub(_SECRET, key) if is_full or len(key) <= 40 else f"<{len(key)} characters>"


def _presented_keys(headers: Headers) -> tuple[str, ...]:
    found = (headers.get("authorization", "").rpartition(" ")[2], headers.get("x-api-key", ""))
    return tuple(key for key in found if len(key) >= 4)
