"""A server of pictures on this host, with HTTPS, some of whose answers nobody should take."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.servers.server_certificates import Authority


class PictureServer:
    """`answers`: by path, the raw response. It counts what was asked for."""

    def __init__(self, port: int, authority: Authority) -> None:
        self.port = port
        self.trust = ssl.create_default_context(cafile=str(authority.file))
        self.answers: dict[str, bytes] = {}
        self.asked: list[str] = []

    def url(self, path: str) -> str:
        return f"https://localhost:{self.port}{path}"

    def put(self, path: str, content: bytes, status: str = "200 OK", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers]
        self.answers[path] = "\r\n".join([*lines, "", ""]).encode() + content

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ")[1].decode()
        self.asked.append(path)
        answer = self.answers.get(path)
        if answer is None:  # silence, until the other end has had enough
            await reader.read()
        else:
            writer.write(answer)
        writer.close()


@asynccontextmanager
async def picture_server(folder: Path) -> AsyncIterator[PictureServer]:
    authority = Authority.new(folder)
    certificate, key = authority.issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    served: list[PictureServer] = []
    server = await asyncio.start_server(lambda *ends: served[0].answer(*ends), "127.0.0.1", 0, ssl=context)
    served.append(PictureServer(server.sockets[0].getsockname()[1], authority))
    try:
        yield served[0]
    finally:
        server.close()
