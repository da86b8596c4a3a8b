"""A file as multipart/form-data, sent in chunks: it is never in memory as a whole."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path

_CHUNK_BYTES = 256 * 1024


def upload_form(path: Path, on_bytes: Callable[[int], None]) -> tuple[dict[str, str], AsyncIterator[bytes]]:
    """Return headers and body of one POST /v1/files; the name is sent without its folder."""
    boundary = secrets.token_hex(16)
    part = f'--{boundary}\r\nContent-Disposition: form-data; name="'
    head = f'{part}purpose"\r\n\r\nbatch\r\n{part}file"; filename="{_quoted(path.name)}"\r\n'
    start = f"{head}Content-Type: application/jsonl\r\n\r\n".encode()
    end = f"\r\n--{boundary}--\r\n".encode()
    num_bytes = path.stat().st_size
    length = str(len(start) + num_bytes + len(end))
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": length}
    return headers, _chunks(path, num_bytes, on_bytes, start=start, end=end)


async def _chunks(
    path: Path, num_bytes: int, on_bytes: Callable[[int], None], *, start: bytes, end: bytes
) -> AsyncIterator[bytes]:
    yield start
    num_sent = 0
    with path.open("rb") as file:
        while num_sent < num_bytes:
            chunk = await asyncio.to_thread(file.read, min(_CHUNK_BYTES, num_bytes - num_sent))
            if not chunk:
                break
            yield chunk
            num_sent += len(chunk)
            on_bytes(num_sent)
    yield end


def _quoted(name: str) -> str:
    plain = name.encode("utf-8", "replace").decode()
    return plain.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
