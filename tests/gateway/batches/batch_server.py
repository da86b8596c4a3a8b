"""A batch gateway on a real port: what went over the wire, in a form that is the same every time, and bad wires."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from alignedserve.gateway.server import bind


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The app's address."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", access_log=False, log_config=None, ws="none"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()


class Recorder:
    """An app in front of an app: keeps every exchange."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.exchanges: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        query = "&".join(sorted(filter(None, scope["query_string"].decode().split("&"))))
        request = f"{scope['method']} {scope['path']}{'?' + query if query else ''}"
        exchange: dict[str, Any] = {"request": request, "asked": b"", "status": 0, "answer": b""}
        self.exchanges.append(exchange)

        async def receive_and_note() -> Any:
            message = await receive()
            exchange["asked"] += message.get("body", b"")
            return message

        async def send_and_note(message: Any) -> None:
            exchange["status"] = message.get("status", exchange["status"])
            exchange["answer"] += message.get("body", b"")
            await send(message)

        await self._app(scope, receive_and_note, send_and_note)


_TIMES = re.compile(r'("(?:created|[a-z_]+_at)": ?)\d+')
_IDS = re.compile(r"(batch_req_|batch_|file-|chatcmpl-)[0-9a-f-]{24,}")


def transcript(exchanges: Iterable[dict[str, Any]]) -> str:
    """One line of JSON per exchange. Ids are numbered as they come, times are 0; of several looks at one batch in a row
    the last one counts."""
    shown: list[dict[str, Any]] = []
    for exchange in exchanges:
        lines = [_plain(line) for line in exchange["answer"].decode().splitlines()]
        one = {
            "request": exchange["request"],
            "body": _asked(exchange["asked"]),
            "status": exchange["status"],
            "answer": lines if exchange["request"].endswith("/content") else lines[0],
        }
        if shown and one["request"].startswith("GET /v1/batches/") and shown[-1]["request"] == one["request"]:
            shown.pop()
        shown.append(one)
    return _numbered("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in shown))


def _asked(body: bytes) -> Any:
    if not body:
        return None
    return dict(sorted(json.loads(body).items())) if body.startswith(b"{") else "multipart/form-data"


def _plain(line: str) -> Any:
    answer = json.loads(_TIMES.sub(r"\g<1>0", line))
    for one in answer.get("data", [answer]):
        if (one.get("alignedserve") or {}).get("quote"):
            one["alignedserve"]["quote"] = sorted(one["alignedserve"]["quote"])
        if one.get("status") == "failed":  # how far its validation had told it was follows from the clock
            one["alignedserve"]["lines_validated"] = 0
        if one.get("response"):
            one["response"]["request_id"] = "a request id"
    return answer


def _numbered(text: str) -> str:
    names: dict[str, str] = {}
    counts: dict[str, int] = {}

    def named(found: re.Match[str]) -> str:
        if found[0] not in names:
            counts[found[1]] = counts.get(found[1], 0) + 1
            names[found[0]] = f"{found[1]}{counts[found[1]]}"
        return names[found[0]]

    return _IDS.sub(named, text)


class CuttingProxy:
    """Hands bytes through to a server; cuts each connection after so many bytes of answers."""

    def __init__(self, url: str, num_bytes_of: Callable[[], int | None]) -> None:
        self._port = int(url.rpartition(":")[2])
        self._num_bytes_of = num_bytes_of  # of the next connection; None: it is never cut
        self.num_cut = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The proxy's address."""
        server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        asked = asyncio.create_task(_pump(reader, far_writer, None))
        try:
            with contextlib.suppress(ConnectionError):
                self.num_cut += await _pump(far_reader, writer, self._num_bytes_of())
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            for side in (far_writer, writer):
                side.transport.abort()
                with contextlib.suppress(ConnectionError):
                    await side.wait_closed()
            self._tasks.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None) -> bool:
    """True when it was the limit that ended it."""
    num_left = limit
    while chunk := await reader.read(65_536):
        writer.write(chunk[:num_left])
        await writer.drain()
        if num_left is not None:
            num_left -= len(chunk)
            if num_left <= 0:
                await asyncio.sleep(0.01)
                return True
    return False
