"""Ids that clients send with a call: their own for it, and the trace that it belongs to (W3C Trace Context)."""

import re
import secrets
from collections.abc import Mapping
from typing import NamedTuple

REQUEST_ID_HEADER = "x-request-id"

_PLAIN_WORD = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)

# Versions to come may have more behind the flags; version ff is none.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.ASCII)
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}", re.ASCII)
_SAMPLED = 1
_RATIO_BITS = 56  # of a trace's id, which its makers are to choose at random


def plain_request_id(text: str | None) -> str | None:
    """Return the client's own id if it is a plain word, which may stand in headers, logs and answers; else None."""
    return text if text is not None and _PLAIN_WORD.fullmatch(text) else None


class TraceContext(NamedTuple):
    """Ids of a call's trace and of its first span."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes = b""  # of the client's span; empty: there is none
    state: str = ""  # the client's `tracestate`


def trace_of(headers: Mapping[str, str], ratio: float) -> TraceContext | None:
    """Return the trace of a call; None: it is not to be traced.

    A client's decision is followed; of the others as many are traced as the ratio says.
    """
    parent = _TRACEPARENT.fullmatch(headers.get("traceparent", "").strip())
    if parent is not None and int(parent[1], 16) and int(parent[2], 16):
        if not int(parent[3], 16) & _SAMPLED:
            return None
        state = headers.get("tracestate", "")
        known = state if _TRACESTATE.fullmatch(state) else ""
        return TraceContext(bytes.fromhex(parent[1]), secrets.token_bytes(8), bytes.fromhex(parent[2]), known)
    trace_id = secrets.token_bytes(16)
    if int.from_bytes(trace_id[-_RATIO_BITS // 8 :]) >= ratio * (1 << _RATIO_BITS):
        return None
    return TraceContext(trace_id, secrets.token_bytes(8))
