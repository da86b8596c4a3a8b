"""Client of the Files and Batches API of any gateway. Lost connections are retried, with a message.

Retries have no effect beyond the first request: creations carry an Idempotency-Key, and an upload whose response was
lost leaves at most an unused file. A server that never responded is reported at once; one that did is waited for.

Running one command against a server: client, messages on stderr, JSON on stdout, exit codes."""

import asyncio
import re
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from alignedserve.cli.batch.formatting import OVER, Rate, num_ended, num_lines, progress_text
from alignedserve.cli.batch.input_check import DEFAULT_LIMITS, FileLimits
from alignedserve.cli.console import FAILURE, notes, printable
from alignedserve.client.sse import error_message, is_key_wanted
from alignedserve.client.unreachable import closed_in_clear, trust_for, unreachable, untrusted
from alignedserve.config.environment import CLIENT_KEY_VARIABLE, client_api_key
from alignedserve.core.errors import ConfigError, PeerError, PeerLost, ProtocolError

_CHUNK_BYTES = 256 * 1024


def upload_form(path: Path, on_bytes: Callable[[int], None]) -> tuple[dict[str, str], AsyncIterator[bytes]]:
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


PATIENCE_S = 600.0  # how long a server that responded before may be down
_CONNECT_S, _SILENCE_S = 10.0, 90.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_MAX_ERROR_BYTES = 64 * 1024
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
_RETRY_STATUS = frozenset({429, 502, 503, 504})

T = TypeVar("T")


class RequestRefused(PeerError):
    """The server refused the request; a retry would be refused too."""

    def __init__(self, message: str, *, status: int, code: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ServerUnavailable(PeerLost):
    """No response, or one that asks to retry later."""

    def __init__(self, message: str, *, has_answered: bool, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.has_answered = has_answered
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class DownloadReceiver:
    """Takes the bytes of a download from an offset on."""

    offset: Callable[[], int]  # the first wanted byte; called again after a lost connection
    take: Callable[[bytes], None]
    begin: Callable[[], None] = field(default=lambda: None)  # drop what was taken since the last whole line


class BatchClient:
    """Used as an async context manager. Methods raise PeerError; see Refused and Away."""

    def __init__(
        self, *, url: str, api_key: str | None, say: Callable[[str], None], patience_s: float = PATIENCE_S
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: must begin with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._say = say
        self._patience_s = patience_s
        self._has_answered = False
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        connector = aiohttp.TCPConnector(ssl=trust_for(self.url) or True)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=timeout, read_bufsize=256 * 1024
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    # --- reading

    async def models(self) -> tuple[str, ...]:
        listed = await self._json("GET", "/v1/models")
        try:
            return tuple(str(model["id"]) for model in listed["data"])
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"{self.url}/v1/models does not list models") from error

    async def limits(self) -> FileLimits:
        """Return the limits of the server; the default ones if it is another product."""
        try:
            limits = await self._json("GET", "/v1/batches/limits")
        except RequestRefused:
            return DEFAULT_LIMITS
        if limits.get("object") != "batch.limits":
            return DEFAULT_LIMITS
        try:
            return FileLimits(*(int(limits[name]) for name in FileLimits._fields))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{self.url}/v1/batches/limits does not list limits") from error

    async def batch(self, batch_id: str) -> dict[str, Any]:
        return await self._json("GET", f"/v1/batches/{batch_id}")

    async def usage(self, query: str) -> dict[str, Any]:
        return await self._json("GET", f"/v1/usage?{query}")

    async def batches(self, limit: int) -> list[dict[str, Any]]:
        batches: list[dict[str, Any]] = []
        while True:
            after = f"&after={batches[-1]['id']}" if batches else ""
            page = await self._json("GET", f"/v1/batches?limit={min(100, limit - len(batches))}{after}")
            batches += page["data"]
            if not page.get("has_more") or not page["data"] or len(batches) >= limit:
                return batches[:limit]

    async def receive(self, file_id: str, receiver: DownloadReceiver) -> None:
        """Download all that a file holds now, from the receiver's offset on; resume after lost connections."""

        async def attempt() -> None:
            receiver.begin()
            offset = receiver.offset()
            headers = {"Range": f"bytes={offset}-"} if offset else {}
            async with self._open.get(f"{self.url}/v1/files/{file_id}/content", headers=headers) as response:
                await self._check(response)
                surplus = offset if response.status == 200 else 0  # from a server without range requests
                async for chunk in response.content.iter_any():
                    receiver.take(chunk[surplus:])
                    surplus = max(0, surplus - len(chunk))

        await self._with_retries(attempt, is_retried=True, position=receiver.offset)

    # --- writing

    async def upload(self, path: Path, on_bytes: Callable[[int], None]) -> dict[str, Any]:
        """Upload a file for batches in chunks; call `on_bytes` with the bytes sent so far."""

        async def attempt() -> dict[str, Any]:
            headers, body = upload_form(path, on_bytes)
            async with self._open.post(f"{self.url}/v1/files", data=body, headers=headers) as response:
                return await self._answer(response)

        return await self._with_retries(attempt, is_retried=True)

    async def create(self, body: dict[str, Any], idempotency_key: str) -> dict[str, Any]:
        return await self._json("POST", "/v1/batches", body, idempotency_key)

    async def cancel(self, batch_id: str) -> dict[str, Any]:
        return await self._json("POST", f"/v1/batches/{batch_id}/cancel")

    async def pause(self, batch_id: str, *, is_paused: bool) -> dict[str, Any]:
        return await self._json("POST", f"/v1/batches/{batch_id}/{'pause' if is_paused else 'resume'}")

    async def delete_file(self, file_id: str) -> None:
        await self._json("DELETE", f"/v1/files/{file_id}")

    # --- one request

    async def _json(
        self, method: str, path: str, body: dict[str, Any] | None = None, idempotency_key: str | None = None
    ) -> dict[str, Any]:
        headers = None if idempotency_key is None else {"Idempotency-Key": idempotency_key}

        async def attempt() -> dict[str, Any]:
            async with self._open.request(method, self.url + path, json=body, headers=headers) as response:
                return await self._answer(response)

        return await self._with_retries(attempt, is_retried=method == "GET" or headers is not None)

    async def _answer(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        await self._check(response)
        raw = await response.content.read(_MAX_ANSWER_BYTES) if response.content_length is None else None
        raw = await response.read() if raw is None else raw
        try:
            answer = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self.url} does not answer in JSON") from error
        if not isinstance(answer, dict):
            raise ProtocolError(f"{self.url} does not answer with a JSON object")
        return answer

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status in (200, 206):
            return
        body = await response.content.read(_MAX_ERROR_BYTES)
        if is_key_wanted(response.status, _code_of(body)):
            hint = f"{self.url} wants a key: set {CLIENT_KEY_VARIABLE} to one that it knows"
            raise RequestRefused(hint, status=response.status, code=None)
        message = error_message(body) or f"status {response.status}"
        header = response.headers.get("Retry-After", "")
        retry_after_s = float(header) if header.isascii() and header.isdigit() else None
        is_quota = response.status == 429
        does_waiting_help = not is_quota or retry_after_s is not None
        if response.status in _RETRY_STATUS and does_waiting_help:
            raise ServerUnavailable(f"{response.status}: {message}", has_answered=is_quota, retry_after_s=retry_after_s)
        raise RequestRefused(message, status=response.status, code=_code_of(body))

    async def _with_retries(
        self, attempt: Callable[[], Awaitable[T]], *, is_retried: bool, position: Callable[[], int] = lambda: 0
    ) -> T:
        lost_s, pause_s = None, _FIRST_PAUSE_S
        while True:
            began = position()
            try:
                result = await self._once(attempt)
            except ServerUnavailable as error:
                if position() > began:  # of a long download: the next loss is another one
                    lost_s, pause_s = None, _FIRST_PAUSE_S
                # Patience begins with the loss: a transfer may have gone well for longer.
                lost_s = time.monotonic() if lost_s is None else lost_s
                waited_s = time.monotonic() - lost_s
                if (error.has_answered and not is_retried) or not self._has_answered or waited_s > self._patience_s:
                    raise
                pause_s = min(_LONGEST_PAUSE_S, max(pause_s, error.retry_after_s or 0.0))
                self._say(f"{str(error).rstrip('.')}; trying again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                pause_s *= 2
                continue
            if lost_s is not None:
                self._say(f"{self.url} answers again")
            return result

    async def _once(self, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            result = await attempt()
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise ConfigError(f"--url {self.url}: no address") from error
        except aiohttp.ClientConnectorError as error:
            distrust = untrusted(self.url, error)
            if distrust is not None:  # which no patience helps
                raise ConfigError(distrust) from error
            if not self._has_answered:
                raise unreachable(self.url, error) from error
            raise ServerUnavailable(f"nothing answers at {self.url}", has_answered=False) from error
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            hint = "" if self._has_answered else closed_in_clear(self.url, error)
            self._has_answered = self._has_answered or not isinstance(error, TimeoutError)
            raise ServerUnavailable(
                f"the connection to {self.url} was lost ({type(error).__name__}){hint}", has_answered=False
            ) from error
        except (ServerUnavailable, RequestRefused):
            self._has_answered = True
            raise
        self._has_answered = True
        return result

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the client is used outside its context"
        return self._session


def _code_of(body: bytes) -> str | None:
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
    return str(code) if code else None


_ID = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)
_SHORT_PATIENCE_S = 30.0  # of commands that take one request


def run_with_client(
    url: str, act: Callable[[BatchClient, Console], Awaitable[int]], patience_s: float = _SHORT_PATIENCE_S
) -> int:
    console = notes()

    def say(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {printable(text)}", markup=False, soft_wrap=True)

    async def run() -> int:
        async with BatchClient(url=url, api_key=client_api_key(), say=say, patience_s=patience_s) as client:
            return await act(client, console)

    return asyncio.run(run())


def checked_id(text: str) -> str:
    """Return an id that may stand in a URL. Raises ConfigError."""
    if not _ID.fullmatch(text):
        raise ConfigError(f"{printable(text)!r} is not a batch id; `alignedserve batch list` shows them")
    return text


def exit_code_of(batch: dict[str, Any]) -> int:
    return FAILURE if batch["status"] in OVER and batch["status"] != "completed" else 0


def print_json(answer: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer)).decode() + "\n")
    sys.stdout.flush()


POLL_S = 1.0
_LINE_EVERY_S = 10.0  # without a terminal, unless the status changes


async def watch_until_over(client: BatchClient, batch_id: str, console: Console) -> dict[str, Any]:
    try:
        return await _watched(client, batch_id, console)
    except asyncio.CancelledError:
        console.print(f"{batch_id} goes on; `alignedserve batch cancel {batch_id}` ends it", soft_wrap=True)
        raise


async def _watched(client: BatchClient, batch_id: str, console: Console) -> dict[str, Any]:
    rate = Rate()
    with _bar(console) if console.is_terminal else _lines(console) as show:
        while True:
            batch = await client.batch(batch_id)
            rate.add(time.monotonic(), num_ended(batch))
            show(batch, progress_text(batch, rate, time.time()))
            if batch["status"] in OVER:
                return batch
            await asyncio.sleep(POLL_S)


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[dict[str, Any], str], None]]:
    columns = (
        TextColumn("[bold]{task.description}[/]"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn(  # a narrow terminal cuts this one
            "{task.fields[text]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        ),
    )
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=4, expand=True)
    task = bar.add_task("", total=None, text="")

    def show(batch: dict[str, Any], text: str) -> None:
        total = num_lines(batch) or None
        bar.update(task, description=str(batch["status"]), completed=num_ended(batch), total=total, text=text)

    with bar:
        yield show


@contextmanager
def _lines(console: Console) -> Iterator[Callable[[dict[str, Any], str], None]]:
    last: tuple[str, int] | None = None
    printed_s = 0.0

    def show(batch: dict[str, Any], text: str) -> None:
        nonlocal last, printed_s
        now, seen = time.monotonic(), (str(batch["status"]), num_ended(batch))
        is_same_status = last is not None and last[0] == seen[0]
        if is_same_status and (seen == last or now - printed_s < _LINE_EVERY_S):
            return
        last, printed_s = seen, now
        count = f" {seen[1]}/{num_lines(batch)}" if num_lines(batch) else ""
        line = f"{time.strftime('%H:%M:%S')} {batch['id']} {seen[0]}{count}{', ' + text if text else ''}"
        console.print(line, markup=False, soft_wrap=True)

    yield show


@contextmanager
def byte_bar(console: Console, label: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show progress through a file, unless stderr is no terminal; yield a function that takes the bytes so far."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=num_bytes)
        yield lambda num_done: bar.update(task, completed=num_done)
