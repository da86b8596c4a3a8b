"""A file as multipart/form-data, sent in chunks: it is never in memory as a whole."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class UploadForm:
    """Body of one request. `chunks` may be called once per attempt."""

    path: Path
    head: bytes
    tail: bytes
    num_bytes: int
    boundary: str
    on_bytes: Callable[[int], None]

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the request."""
        length = len(self.head) + self.num_bytes + len(self.tail)
        return {"Content-Type": f"multipart/form-data; boundary={self.boundary}", "Content-Length": str(length)}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        yield self.head
        num_sent = 0
        with self.path.open("rb") as file:
            while num_sent < self.num_bytes:
                chunk = await asyncio.to_thread(file.read, min(_CHUNK_BYTES, self.num_bytes - num_sent))
                if not chunk:
                    break
                yield chunk
                num_sent += len(chunk)
                self.on_bytes(num_sent)
        yield self.tail


def upload_form(path: Path, on_bytes: Callable[[int], None]) -> UploadForm:
    """Build the form for POST /v1/files; the name is sent without its folder."""
    boundary = secrets.token_hex(16)
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="'
    head = f'{part}purpose"\r\n\r\nbatch\r\n{part}file"; filename="{_quoted(path.name)}"\r\n'
    head += "Content-Type: application/jsonl\r\n\r\n"
    tail = f"\r\n--{boundary}--\r\n"
    return UploadForm(path, head.encode(), tail.encode(), path.stat().st_size, boundary, on_bytes)


def _quoted(name: str) -> str:
    """Quote a file name as browsers do (HTML living standard, multipart/form-data)."""
    plain = name.encode("utf-8", "replace").decode()
    return plain.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
