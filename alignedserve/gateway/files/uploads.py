"""Upload of a file: multipart/form-data parsed as it arrives, the file's bytes written straight to storage."""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from alignedserve.api.errors import BodyTooLarge, BodyTooSlow, ClientDisconnected, QuotaExceeded, WrongContentType
from alignedserve.batches.interfaces import BlobWriter, ContentStore
from alignedserve.batches.records import FileId
from alignedserve.core.errors import InvalidRequest

_MAX_FIELD_BYTES = 4096
_MAX_PARTS = 16
_MAX_NAME_LEN = 255
_SILENCE_S = 60.0
_ENVELOPE_BYTES = 64 * 1024  # of a body without its file
_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


@dataclass(slots=True)
class Upload:
    """A received form. The blob is written but not committed."""

    blob: BlobWriter
    name: str = ""
    num_bytes: int = 0
    num_lines: int = 0
    digest: str = ""  # of the bytes
    fields: dict[str, str] = field(default_factory=dict)


async def receive_upload(
    http: Request, blobs: ContentStore, file_id: FileId, max_file_bytes: int, take: Callable[[int], None]
) -> Upload:
    """Read the whole body. `take`: is told of bytes before they are written, and may raise.

    Raises InvalidRequest, StorageFull; the blob is discarded then.
    """
    media_type, options = parse_options_header(http.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if media_type != b"multipart/form-data" or not 0 < len(boundary) <= 256:
        raise WrongContentType("The Content-Type header must be multipart/form-data with a boundary.")
    if http.headers.get("content-encoding", "identity") != "identity":
        raise WrongContentType("A file must be sent without a Content-Encoding.")
    length = http.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_file_bytes + _ENVELOPE_BYTES:
        raise BodyTooLarge(f"The file is larger than {max_file_bytes} bytes.")
    form = _Form(boundary, Upload(await blobs.begin(file_id)), max_file_bytes, take)
    try:
        await _read(http, form)
        return form.finish()
    except BaseException:
        await form.upload.blob.discard()
        raise


async def arriving(http: Request) -> AsyncIterator[bytes]:
    """Yield a body of any length as it arrives. Raises BodyTooSlow at a silence, ClientDisconnected."""
    chunks = http.stream()
    try:
        while True:
            async with asyncio.timeout(_SILENCE_S):
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk
    except TimeoutError as error:
        raise BodyTooSlow("The body did not arrive in time.") from error
    except ClientDisconnect as error:
        raise ClientDisconnected("The client disconnected before its body was complete.") from error


async def _read(http: Request, form: "_Form") -> None:
    try:
        async for chunk in arriving(http):
            await form.push(chunk)
    except FormParserError as error:
        raise InvalidRequest("The body is not valid multipart/form-data.", code="invalid_multipart") from error


class _Form:
    def __init__(self, boundary: bytes, upload: Upload, max_file_bytes: int, take: Callable[[int], None]) -> None:
        self.upload = upload
        self._take = take
        self._max_file_bytes = max_file_bytes
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_end": self._whole,
            },
        )
        self._num_bytes_beside = 0  # of the body so far, without its file
        self._num_parts = 0
        self._name, self._value = b"", b""  # of the present header; the parser bounds its length
        self._disposition = b""
        self._field: str | None = None  # the part's name; None: the file
        self._text = b""
        self._file_pieces: list[bytes] = []
        self._has_file = False
        self._is_whole = False
        self._last_byte = b""
        self._digest = hashlib.blake2b(digest_size=16)

    async def push(self, chunk: bytes) -> None:
        self._parser.write(chunk)
        content = b"".join(self._file_pieces)
        self._file_pieces.clear()
        if not content:
            self._num_bytes_beside += len(chunk)
            if self._num_bytes_beside > _ENVELOPE_BYTES:
                raise BodyTooLarge(f"The body has more than {_ENVELOPE_BYTES} bytes beside its file.")
            return
        self.upload.num_bytes += len(content)
        if self.upload.num_bytes > self._max_file_bytes:
            raise BodyTooLarge(f"The file is larger than {self._max_file_bytes} bytes.")
        self._take(len(content))
        self.upload.num_lines += content.count(b"\n")
        self._last_byte = content[-1:]
        self._digest.update(content)
        await self.upload.blob.write(content)

    def finish(self) -> Upload:
        if not self._is_whole:
            raise InvalidRequest("The body ends in the middle.", code="invalid_multipart")
        if not self._has_file:
            raise InvalidRequest("file is missing.", param="file", code="missing_required_parameter")
        self.upload.num_lines += self._last_byte not in (b"", b"\n")
        self.upload.digest = self._digest.hexdigest()
        return self.upload

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequest(f"The form has more than {_MAX_PARTS} parts.", code="invalid_multipart")
        self._disposition = b""

    def _header_name(self, chunk: bytes, start: int, end: int) -> None:
        self._name += chunk[start:end]

    def _header_value(self, chunk: bytes, start: int, end: int) -> None:
        self._value += chunk[start:end]

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name, self._value = b"", b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._text, self._field = b"", name
        if name == "file":
            if self._has_file:
                raise InvalidRequest("file was given twice.", param="file", code="invalid_multipart")
            self._has_file, self._field = True, None
            self.upload.name = shown_name(options.get(b"filename", b"").decode("utf-8", "replace"))
        elif name not in _FIELDS:
            shown = name[:64]
            raise InvalidRequest(f"Unrecognized request argument: {shown!r}.", param=shown, code="unknown_parameter")

    def _data(self, chunk: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._file_pieces.append(chunk[start:end])
            return
        self._text += chunk[start:end]
        if len(self._text) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._field} is too long.", param=self._field)

    def _end(self) -> None:
        if self._field is not None:
            self.upload.fields[self._field] = self._text.decode("utf-8", "replace")

    def _whole(self) -> None:
        self._is_whole = True


def shown_name(name: str) -> str:
    """Return the last part of a file's name for display; it never becomes a path."""
    last = re.split(r"[/\\]", name)[-1]
    printable = "".join(character for character in last if character.isprintable())
    return printable[:_MAX_NAME_LEN] or "upload"


def too_many_files() -> QuotaExceeded:
    """Return the error of a key that has no room for another file."""
    return QuotaExceeded("This key has too many files; delete some.", retry_after_s=None)


class ArrivingUploads:
    """Counts the bytes of arriving uploads for each owner."""

    def __init__(self) -> None:
        self._num_bytes = Counter[str]()

    @contextmanager
    def counted(self, owner: str, room: int) -> Iterator[Callable[[int], None]]:
        num_bytes = 0

        def take(more: int) -> None:
            nonlocal num_bytes
            if self._num_bytes[owner] + more > room:
                raise too_many_files()
            self._num_bytes[owner] += more
            num_bytes += more

        try:
            yield take
        finally:
            self._num_bytes[owner] -= num_bytes
            if not self._num_bytes[owner]:
                del self._num_bytes[owner]
