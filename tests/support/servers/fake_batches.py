"""A small OpenAI-compatible server with files and batches, which answers at once and can be told to go wrong."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "fake-model"


@dataclass
class FakeBatches:
    """Scripts of one server. Every answer is a function of its prompt."""

    windows: tuple[str, ...] | None = None  # that it takes; None: any
    loses: int | None = None  # the n-th line of every batch has no record
    doubles: int | None = None
    garbles: bool = False  # in batches, answers differ
    dies_with_first_batch: bool = False
    takes_batches: bool = True  # False: listed, but not created
    lasts_s: float = 0.3  # a batch, from its creation
    num_failed: int = 0  # lines of every batch, as it says while it lasts
    num_chats: int = 0
    cancelled: list[str] = field(default_factory=list)
    windows_asked: list[str] = field(default_factory=list)
    _files: dict[str, bytes] = field(default_factory=dict)
    _batches: dict[str, dict[str, Any]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    _ends_s: dict[str, float] = field(default_factory=dict)
    _runner: web.AppRunner | None = None
    _dying: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve on a free port as long as the context; its value is the address."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/files", self._upload),
                web.get("/v1/files/{id}/content", self._content),
                web.delete("/v1/files/{id}", self._delete),
                web.get("/v1/batches", self._list),
                web.post("/v1/batches", self._create),
                web.get("/v1/batches/{id}", self._batch),
                web.post("/v1/batches/{id}/cancel", self._cancel),
            ]
        )
        self._runner = runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        (address,) = runner.addresses
        try:
            yield f"http://127.0.0.1:{address[1]}"
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.num_chats += 1
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        with contextlib.suppress(ConnectionError):  # the client may go away
            await self._stream(request, response, body)
        return response

    async def _stream(self, request: web.Request, response: web.StreamResponse, body: dict[str, Any]) -> None:
        await response.prepare(request)
        words = [f"{word} " for word in _answer(body).split()]
        for word in words:
            await response.write(_event({"choices": [{"index": 0, "delta": {"content": word}}]}))
        await response.write(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
        usage = {"prompt_tokens": 100, "completion_tokens": len(words)}
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")

    # --- files and batches

    async def _upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        file = form["file"]
        assert isinstance(file, web.FileField)
        return web.json_response({"id": self._keep(file.file.read()), "object": "file"})

    def _keep(self, content: bytes) -> str:
        file_id = f"file-{len(self._files)}"
        self._files[file_id] = content
        return file_id

    async def _content(self, request: web.Request) -> web.Response:
        return web.Response(body=self._files[request.match_info["id"]])

    async def _delete(self, request: web.Request) -> web.Response:
        return web.json_response({"deleted": True})

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [], "has_more": False})

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        window = body["completion_window"]
        self.windows_asked.append(window)
        if self.dies_with_first_batch and self._runner is not None:
            self._dying = asyncio.create_task(self._runner.cleanup())
        if not self.takes_batches:
            return web.json_response({"error": {"message": "no such route"}}, status=404)
        if self.windows is not None and window not in self.windows:
            return web.json_response({"error": {"message": "completion_window must be 24h"}}, status=400)
        lines = self._files[body["input_file_id"]].splitlines()
        batch_id = f"batch-{len(self._batches)}"
        output = self._keep(b"\n".join(self._records(lines)) + b"\n")
        self._batches[batch_id] = {"id": batch_id, "output_file_id": output}
        self._sizes[batch_id] = len(lines)
        self._ends_s[batch_id] = time.monotonic() + self.lasts_s
        return web.json_response(self._view(batch_id))

    def _view(self, batch_id: str) -> dict[str, Any]:
        is_over, size = time.monotonic() >= self._ends_s[batch_id], self._sizes[batch_id]
        counts = {"total": size, "completed": size if is_over else 0, "failed": 0 if is_over else self.num_failed}
        status = "completed" if is_over else "in_progress"
        return {**self._batches[batch_id], "status": status, "request_counts": counts}

    def _records(self, lines: list[bytes]) -> list[bytes]:
        records = []
        for number, line in enumerate(map(json.loads, lines)):
            if number == self.loses:
                continue
            text = _answer(line["body"]) + (" otherwise" if self.garbles else "")
            usage = {"prompt_tokens": 10, "completion_tokens": line["body"]["max_tokens"]}
            body = {"choices": [{"message": {"content": text}}], "usage": usage}
            record = {"custom_id": line["custom_id"], "response": {"status_code": 200, "body": body}, "error": None}
            records += [json.dumps(record).encode()] * (2 if number == self.doubles else 1)
        return records

    async def _batch(self, request: web.Request) -> web.Response:
        return web.json_response(self._view(request.match_info["id"]))

    async def _cancel(self, request: web.Request) -> web.Response:
        self.cancelled.append(request.match_info["id"])
        return web.json_response(self._view(request.match_info["id"]))


def _answer(body: dict[str, Any]) -> str:
    """Return as many words as were asked for; streamed and whole answers are the same but for the last space."""
    first = body["messages"][-1]["content"].split()[0]
    return " ".join([first] * int(body["max_tokens"])) + " "


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
