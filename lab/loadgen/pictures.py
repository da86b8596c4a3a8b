"""Pictures for load tests: squares of random colours, each another one, as small files that any server can read."""

import base64
import random
import struct
import zlib

_CELLS = 16  # of colour, along an edge
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def picture_url(edge: int, rng: random.Random) -> str:
    """Return the data URL of a PNG of `edge` x `edge` pixels, whose colours `rng` draws."""
    return f"data:image/png;base64,{base64.b64encode(_png(edge, rng)).decode()}"


def _png(edge: int, rng: random.Random) -> bytes:
    places = [pixel * _CELLS // edge for pixel in range(edge)]
    colours = [[rng.randbytes(3) for _ in range(_CELLS)] for _ in range(_CELLS)]
    rows = [b"\0" + b"".join([line[index] for index in places]) for line in colours]  # 0: no filter
    pixels = zlib.compress(b"".join([rows[index] for index in places]), 1)
    header = struct.pack(">IIBBBBB", edge, edge, 8, 2, 0, 0, 0)  # 8 bits of red, green and blue
    chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", pixels), _chunk(b"IEND", b""))
    return _SIGNATURE + b"".join(chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
