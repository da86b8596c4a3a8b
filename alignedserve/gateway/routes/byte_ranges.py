"""Part of a file, as `Range: bytes=N-` asks for it: how a download goes on after a lost connection (RFC 9110, 14)."""

import re

from starlette.requests import Request

_FROM = re.compile(r"bytes=(\d{1,15})-", re.ASCII)


def first_byte(http: Request) -> int | None:
    """Where a client wants to begin; None: no range, or one of another form, which may be ignored."""
    asked = _FROM.fullmatch(http.headers.get("range", "").strip())
    return int(asked[1]) if asked else None
