"""Bodies that clients send compressed."""

import zlib

from alignedserve.api.errors import BodyTooLarge, WrongContentType
from alignedserve.core.errors import InvalidRequest

_GZIP_BITS = 16 + zlib.MAX_WBITS
_KNOWN = ("", "identity", "gzip", "x-gzip")


def check_encoding(encoding: str) -> None:
    """Raise WrongContentType for an encoding that is not read. `encoding`: the header's value."""
    if encoding.strip().lower() not in _KNOWN:
        raise WrongContentType("The Content-Encoding header must be gzip, or be left out.")


def decoded(raw: bytes, encoding: str, limit: int) -> bytes:
    """Return the body as it was before the client encoded it; no more than `limit` bytes are ever made of it.

    Raises BodyTooLarge, WrongContentType, InvalidRequest.
    """
    check_encoding(encoding)
    if encoding.strip().lower() in ("", "identity"):
        return raw
    gzip = zlib.decompressobj(_GZIP_BITS)
    try:
        body = gzip.decompress(raw, limit + 1)
    except zlib.error as error:
        raise InvalidRequest("The body is not valid gzip.", code="invalid_encoding") from error
    if len(body) > limit:
        raise BodyTooLarge(f"The body is larger than {limit} bytes.")
    if not gzip.eof or gzip.unused_data:
        raise InvalidRequest("The body is not one whole gzip member.", code="invalid_encoding")
    return body
