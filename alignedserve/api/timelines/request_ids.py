"""The client's own id for a request."""

import re

REQUEST_ID_HEADER = "x-request-id"

_PLAIN_WORD = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)


def plain_request_id(text: str | None) -> str | None:
    """Return the client's own id if it is a plain word, which may stand in headers, logs and answers; else None."""
    return text if text is not None and _PLAIN_WORD.fullmatch(text) else None
