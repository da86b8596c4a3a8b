"""The header `Range: bytes=N-`, by which a download resumes after a lost connection (RFC 9110, section 14)."""

import re

from starlette.requests import Request

_FROM = re.compile(r"bytes=(\d{1,15})-", re.ASCII)


def first_byte(http: Request) -> int | None:
    """Return the first byte asked for; None without a range, or with one of another form, which may be ignored."""
    asked = _FROM.fullmatch(http.headers.get("range", "").strip())
    return int(asked[1]) if asked else None
