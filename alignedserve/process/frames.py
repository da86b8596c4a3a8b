"""Frames on the pipes of a child process: a length (4 bytes, little-endian) and that many bytes."""

from typing import IO

_LEN_BYTES = 4


def write_frame(stream: IO[bytes], content: bytes) -> None:
    """Write one frame. Raises OSError if nobody reads."""
    stream.write(len(content).to_bytes(_LEN_BYTES, "little"))
    stream.write(content)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read one frame; None: the stream has ended."""
    header = stream.read(_LEN_BYTES)
    if len(header) < _LEN_BYTES:
        return None
    count = int.from_bytes(header, "little")
    content = stream.read(count)
    return content if len(content) == count else None
