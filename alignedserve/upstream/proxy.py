"""Passes calls on to upstream servers and their answers back, as they come.

When an upstream fails before the client has had anything, the call goes to another upstream; afterwards its stream
ends with an error. So no token is ever sent twice.
"""

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import aiohttp

from alignedserve.api.errors import (
    BodyTooLarge,
    GenerationError,
    GenerationFailed,
    Loop,
    NotFound,
    Overloaded,
    ResourceUnavailable,
    TimedOut,
    Unavailable,
)
from alignedserve.client.unreachable import trust_for, unreachable
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ContextTooLong, InvalidRequest, NothingListens, ProtocolError
from alignedserve.core.request import RequestClass, Slo
from alignedserve.process.background_tasks import start_background
from alignedserve.upstream.dialect import (
    LOOP_HEADER,
    MAX_BODY_BYTES,
    MAX_LIST_BYTES,
    PROBE_TEXT,
    AnswerUsage,
    EventCutter,
    Manners,
    UpstreamModel,
    body_for,
    known_code,
    read_models,
    read_whole,
    says_nothing,
    wants_usage,
)
from alignedserve.upstream.logic import TICK_S, UpstreamLogic, WaitingCall

logger = logging.getLogger(__name__)

_CONNECT_S, _LOOK_TIMEOUT_S, _CANARY_S = 5.0, 5.0, 60.0
_MAX_ATTEMPTS = 3
_MAX_ERROR_BYTES = 16 * 1024
_HELD_BYTES = 64 * 1024  # of a stream that has said nothing yet
_RETRY_S = 1.0
_WHOLE = 10.0  # times the longest silence of a stream that a whole answer may take
_LOOP_STATUS = 508
_CHAT = "/v1/chat/completions"
_LOST = "The upstream server was lost while it answered."
_ALL_FAILED = "No upstream server could answer the request."


Write = Callable[[bytes], Awaitable[None]]


class Again(Exception):
    """An upstream failed before its client had anything: the call may go elsewhere."""

    def __init__(self, error: GenerationError) -> None:
        super().__init__(str(error))
        self.error = error  # if there is nowhere else


class _Shed(Exception):
    """A document is taken back for chat."""


@dataclass(slots=True)
class PassedCall:
    """One call and what is sent for it."""

    call: WaitingCall
    path: str
    fields: Mapping[str, Any] = field(repr=False)
    usage: AnswerUsage
    doors: str = ""  # that it came through
    headers: Mapping[str, str] = field(default_factory=dict)
    on_first: Callable[[float], None] | None = None
    on_placed: Callable[[str], None] | None = None
    placed: "asyncio.Future[str] | None" = None
    task: "asyncio.Task[Any] | None" = None  # of an attempt that may be taken back

    @property
    def is_document(self) -> bool:
        return self.call.request_class is RequestClass.BEST_EFFORT

    @property
    def is_streamed(self) -> bool:
        return self.fields.get("stream") is True


class UpstreamProxy:
    """All upstreams of this process. `start` before use, `stop` once; one event loop."""

    def __init__(
        self, logic: UpstreamLogic, config: GatewayConfig, *, key: str | None, on_models: Callable[[], None]
    ) -> None:
        """`key`: of the upstreams. `on_models`: called when another set of models is served."""
        self.logic = logic
        self.door_id = secrets.token_hex(8)
        self.manners = {url: Manners() for url in logic.upstreams}
        self.lengths: dict[str, int] = {}  # of contexts, the least of each model's upstreams
        self.idle_s: tuple[float, float] = (0.0, 0.0)  # the best first token and gap of a canary
        self.problems: list[str] = []  # models that share a name
        self._config = config
        self._key = key
        self._on_models = on_models
        self._jobs: dict[str, PassedCall] = {}
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._looks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Look at every upstream once, for some seconds at most; further looks follow in the background."""
        # No proxy of the environment is used, and no redirect followed: what is named is what is called.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0, ssl=trust_for("https://") or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            read_bufsize=256 * 1024,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        now = time.monotonic()
        for url in self.logic.due_looks(now):
            self._look_soon(url)
        await asyncio.wait(self._looks.values(), timeout=2 * _LOOK_TIMEOUT_S)
        self._tasks = [start_background(self._run(), "the upstreams")]

    async def stop(self) -> None:
        for task in (*self._tasks, *self._looks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._looks.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # --- one call

    async def whole(self, job: PassedCall) -> bytes:
        """Return the whole answer. Raises GenerationError, InvalidRequest. Cancelling it frees everything."""
        body: bytes = await self._attempts(job, self._whole)
        return body

    async def stream(self, job: PassedCall, write: Write) -> None:
        """Write the events as they come. Raises as `whole`."""
        await self._attempts(job, partial(self._stream, write=write))

    async def _attempts(self, job: PassedCall, attempt: Callable[..., Any]) -> Any:
        call, num_failed = job.call, 0
        try:
            while True:
                url = await self._place(job)
                try:
                    result = await self._attempt(job, url, attempt)
                except _Shed:
                    call.num_shed += 1
                    continue
                except Again as again:
                    self.logic.end(call, is_answered=False)
                    call.avoided |= {url}
                    num_failed += 1
                    if num_failed >= _MAX_ATTEMPTS:
                        raise again.error from again
                    if isinstance(again.error, Overloaded | TimedOut) and len(self.logic.serving(call.model)) < 2:
                        raise again.error from again
                    continue
                self.logic.end(call, is_answered=True)
                return result
        finally:
            self._jobs.pop(call.call_id, None)
            self.logic.end(call, is_answered=False)
            self._start_calls()

    async def _place(self, job: PassedCall) -> str:
        call, now = job.call, time.monotonic()
        if not self.logic.serving(call.model) and not job.is_document:
            raise Unavailable("No upstream server of this model answers at present.", retry_after_s=_RETRY_S)
        job.placed = asyncio.get_running_loop().create_future()
        self._jobs[call.call_id] = job
        self.logic.arrive(call, now)
        self._start_calls()
        patience_s = self._config.best_effort_timeout_s if job.is_document else self._config.first_token_timeout_s
        try:
            async with asyncio.timeout(patience_s):
                url = await job.placed
        except TimeoutError as error:
            raise TimedOut(f"The request waited for {patience_s:g} s for an upstream server.") from error
        if job.on_placed is not None:
            job.on_placed(url)
        return url

    def _start_calls(self) -> None:
        for started in self.logic.starts(time.monotonic()):
            job = self._jobs.get(started.call_id)
            if job is not None and job.placed is not None and not job.placed.done():
                job.placed.set_result(started.url)

    async def _attempt(self, job: PassedCall, url: str, attempt: Callable[..., Any]) -> Any:
        job.task = asyncio.current_task()
        if not job.call.may_be_shed:
            return await attempt(job, url)
        work = job.task = asyncio.create_task(attempt(job, url))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if work.cancelled() and job.call.url is None:  # by `_shed`
                raise _Shed from None
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            raise

    def _shed(self, call: WaitingCall) -> None:
        job = self._jobs.get(call.call_id)
        if job is not None and job.task is not None and not job.task.done():
            self.logic.end(call, is_answered=False)
            job.task.cancel()

    # --- one attempt

    @contextlib.asynccontextmanager
    async def _request(self, job: PassedCall, url: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a call; refusals of the upstream and what it cannot do are raised. Raises Again, GenerationError."""
        assert self._session is not None, "a proxy that was not started"
        manners, config = self.manners[url], self._config
        body, has_additions = body_for(
            job.fields, manners, job.path, is_document=job.is_document, terms=job.call.scheduler_terms()
        )
        # Of an answer that is not streamed nothing comes before its end.
        answer_s = config.token_timeout_s if job.is_streamed else _WHOLE * config.token_timeout_s
        silence_s = config.best_effort_timeout_s if job.is_document else answer_s
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=silence_s)
        headers = {
            **job.headers,
            "Content-Type": "application/json",
            LOOP_HEADER: ",".join(filter(None, (job.doors, self.door_id))),
        }
        try:
            async with self._session.post(
                url + job.path, data=body, headers=headers, timeout=limits, allow_redirects=False
            ) as response:
                if response.status == 400 and has_additions and manners.takes_additions:
                    await response.content.read(_MAX_ERROR_BYTES)
                    manners.takes_additions = False
                    logger.info("%s takes no additions to a request", url)
                elif response.status != 200:
                    await self._refuse(job, url, response)
                else:
                    yield response
                    return
            try:
                async with self._request(job, url) as plain:
                    yield plain
            except InvalidRequest:  # so it was the client's own
                manners.takes_additions = True
                raise
        except aiohttp.ClientConnectorError as error:
            self._down(url, _words(url, error))
            raise Again(Unavailable(_ALL_FAILED)) from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:  # also while an answer is read
            self._strike(url, f"{type(error).__name__}")
            raise self._lost(job, isinstance(error, TimeoutError)) from error
        except ProtocolError as error:
            self._strike(url, str(error))
            raise self._lost(job, is_silent=False) from error

    def _lost(self, job: PassedCall, is_silent: bool) -> Exception:
        if job.call.first_s is not None:
            return GenerationFailed(_LOST)
        return Again(TimedOut("The upstream server did not answer in time.") if is_silent else Unavailable(_ALL_FAILED))

    async def _refuse(self, job: PassedCall, url: str, response: aiohttp.ClientResponse) -> NoReturn:
        """Raise what a refusal means. Of its words only codes that mean the same everywhere are repeated."""
        status, body = response.status, await response.content.read(_MAX_ERROR_BYTES)
        logger.info("%s answered %d to %s", url, status, job.call.call_id)
        if status in (429, 503):
            wait_s = _retry_after(response.headers.get("Retry-After", ""))
            self.logic.on_busy(url, wait_s, time.monotonic())
            kind = ResourceUnavailable if job.is_document else Overloaded
            raise Again(kind("The upstream server has no capacity now.", retry_after_s=wait_s))
        if status == _LOOP_STATUS:
            if not job.doors:  # else it is for the first door of the chain to know
                self._down(url, "it is this server itself, or leads back to it", for_good=True)
            raise Again(Loop("The upstream server leads back to this one."))
        if status >= 500 or status in (401, 403) or status < 400:
            self._strike(url, f"it answers with status {status}")
            raise Again(Unavailable(_ALL_FAILED) if status >= 500 else GenerationFailed(_ALL_FAILED))
        code = known_code(body)
        if code == "context_length_exceeded":
            raise ContextTooLong("The prompt and its answer are longer than the model's context.")
        if status in (404, 405):
            if code == "model_not_found":
                self._look_soon(url)
                raise Again(Unavailable(_ALL_FAILED))
            raise NotFound(f"The upstream server does not serve {job.path}.", code="unknown_url")
        if status == 413:
            raise BodyTooLarge("The body is larger than the upstream server reads.")
        raise InvalidRequest(f"The upstream server refused the request (status {status}).", code=code or "refused")

    async def _whole(self, job: PassedCall, url: str) -> bytes:
        async with self._request(job, url) as response:
            parts, num_bytes = [], 0
            async for part in response.content.iter_any():
                num_bytes += len(part)
                if num_bytes > MAX_BODY_BYTES:
                    raise ProtocolError("its answer is too long")
                parts.append(part)
            body = b"".join(parts)
            read_whole(body, job.usage)
        now = time.monotonic()
        self.logic.on_token(job.call, job.usage.output_tokens, now)
        if job.on_first is not None:
            job.on_first(now)
        return body

    async def _stream(self, job: PassedCall, url: str, write: Write) -> None:
        usage, call = job.usage, job.call
        usage.num_events = usage.num_bytes = 0
        cutter = EventCutter(
            usage, shows_usage=(job.path != _CHAT and "completions" not in job.path) or wants_usage(job.fields)
        )
        held, num_before, num_received = b"", 0, 0
        patience_s = self._config.best_effort_timeout_s if job.is_document else self._config.first_token_timeout_s
        async with self._request(job, url) as response:
            if not response.content_type.startswith("text/event-stream"):
                raise ProtocolError("it does not stream")
            stream = response.content
            while True:
                if call.first_s is None:
                    async with asyncio.timeout(patience_s):
                        received = await stream.readany()
                else:
                    received = await stream.readany()
                if not received:
                    break
                num_received += len(received)
                if num_received > MAX_BODY_BYTES:
                    raise ProtocolError("its stream is too long")
                events = cutter.feed(received)
                if not events:
                    if cutter.problem:
                        raise ProtocolError(cutter.problem)
                    continue
                if call.first_s is None:
                    held += events
                    if len(held) < _HELD_BYTES and says_nothing(held):
                        usage.num_events = 0
                        continue
                    events, now = held, time.monotonic()
                    self.logic.on_token(call, usage.num_events, now)
                    if job.on_first is not None:
                        job.on_first(now)
                else:
                    call.num_tokens += usage.num_events - num_before
                num_before = usage.num_events
                await write(events)
                if cutter.problem:
                    raise ProtocolError(cutter.problem)
            if not cutter.is_complete:
                raise ProtocolError("its stream ended in the middle")
            if not cutter.is_done and job.path in (_CHAT, "/v1/completions"):
                await write(b"data: [DONE]\n\n")

    # --- looking at upstreams

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for call in self.logic.tick(now):
                self._shed(call)
            for url in self.logic.due_looks(now):
                self._look_soon(url)
            for url in self.logic.wants_canary(now):
                self._start_look(f"{url} canary", partial(self._canary_beside, url))
            self._start_calls()

    def _look_soon(self, url: str) -> None:
        self._start_look(url, lambda: self._look(url))

    def _start_look(self, name: str, look: Callable[[], Any]) -> None:
        if name not in self._looks:
            task = self._looks[name] = start_background(look(), f"a look at {name}")
            task.add_done_callback(lambda _: self._looks.pop(name, None))

    async def _look(self, url: str) -> None:
        was_up, before = self.logic.upstreams[url].is_up, self.logic.models
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                listed = await self._list(url)
            if not was_up or {item.name for item in listed} != set(self.logic.upstreams[url].models):
                listed = await self._fingerprinted(url, listed)
        except (aiohttp.ClientError, OSError, ProtocolError) as error:
            is_ours = isinstance(error, ProtocolError)
            self._down(url, str(error) if is_ours else _words(url, error))
            return
        if self.logic.upstreams[url].is_refused:
            return
        known = self.logic.upstreams[url].models
        fingerprints = {
            item.name: item.fingerprint if not was_up or item.name not in known else known[item.name] for item in listed
        }
        for problem in self.logic.on_listed(url, fingerprints):
            logger.warning("%s", problem)
            self.problems.append(problem)
        for item in listed:
            if item.max_context_len is not None:
                self.lengths[item.name] = min(self.lengths.get(item.name, item.max_context_len), item.max_context_len)
        if self.logic.upstreams[url].is_up and not was_up:
            logger.info("%s serves %s", url, ", ".join(self.logic.upstreams[url].models))
        if self.logic.models != before or not was_up:
            self._on_models()
        self._start_calls()

    async def _list(self, url: str) -> list[UpstreamModel]:
        assert self._session is not None, "a proxy that was not started"
        headers = {LOOP_HEADER: self.door_id}
        async with self._session.get(url + "/v1/models", headers=headers, allow_redirects=False) as response:
            if response.status in (401, 403):
                raise ProtocolError("it wants a key: set ALIGNEDSERVE_UPSTREAM_KEY")
            if response.status != 200:
                raise ProtocolError(f"it answers with status {response.status} to /v1/models")
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > MAX_LIST_BYTES:
                    raise ProtocolError("its list of models is too long")
        listed = read_models(bytes(body))
        self.manners[url].owner = listed[0].owner if listed else ""
        return listed

    async def _fingerprinted(self, url: str, listed: list[UpstreamModel]) -> list[UpstreamModel]:
        """Ask each model for a token: what it counts of a fixed prompt tells models of one name apart."""
        done = []
        for item in listed[:8]:
            with contextlib.suppress(GenerationError, InvalidRequest, Again):
                usage = await self._canary(url, item.name, Slo())
                fingerprint = item.fingerprint._replace(probe_tokens=usage.said.get(b"prompt"))
                item = replace(item, fingerprint=fingerprint)
            if self.logic.upstreams[url].is_refused:
                return []
            done.append(item)
        return [*done, *listed[8:]]

    async def _canary(self, url: str, model: str, slo: Slo) -> AnswerUsage:
        """Be a chat of a few tokens; return what the upstream says of its usage. Raises as `whole`, and Again."""
        name, began_s, times = f"canary-{secrets.token_hex(4)}", time.monotonic(), list[float]()
        call = WaitingCall(name, model, RequestClass.REAL_TIME, "", 1.0, 16, slo, url=url, started_s=began_s)
        messages = [{"role": "user", "content": PROBE_TEXT}]
        fields = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "stream": True}
        job = PassedCall(call, _CHAT, fields, AnswerUsage.of(PROBE_TEXT.encode()))

        async def note(_: bytes) -> None:
            times.append(time.monotonic())

        calls = self.logic.upstreams[url].calls
        calls[name] = call
        try:
            async with asyncio.timeout(_CANARY_S):
                await self._stream(job, url, note)
        finally:
            calls.pop(name, None)
        if times and not slo.ttft_s:
            first_s, gap_s = times[0] - began_s, (times[-1] - times[0]) / max(len(times) - 1, 1)
            self.idle_s = min(self.idle_s[0] or math.inf, first_s), min(self.idle_s[1] or math.inf, gap_s)
        return job.usage

    async def _canary_beside(self, url: str) -> None:
        """Be a chat beside documents, to learn before the next client comes."""
        calls = self.logic.upstreams[url].calls.values()
        model = next((call.model for call in calls if call.request_class is RequestClass.BEST_EFFORT), None)
        with contextlib.suppress(GenerationError, InvalidRequest, Again, TimeoutError):
            if model is not None:
                await self._canary(url, model, self.slo())
        await asyncio.sleep(1.0)

    def slo(self) -> Slo:
        """Return the objectives of chat that the documents give way to where chat names none."""
        return self._config.named_slo.completed_by(Slo(1.0, 0.2))

    def _strike(self, url: str, problem: str) -> None:
        was_up = self.logic.upstreams[url].is_up
        self.logic.on_strike(url, problem, time.monotonic())
        self._tell(url, was_up)

    def _down(self, url: str, problem: str, *, for_good: bool = False) -> None:
        was_up = self.logic.upstreams[url].is_up
        self.logic.on_down(url, problem, time.monotonic(), for_good=for_good)
        self._tell(url, was_up)

    def _tell(self, url: str, was_up: bool) -> None:
        upstream = self.logic.upstreams[url]
        if was_up and not upstream.is_up:
            logger.warning("%s gets no more requests: %s", url, upstream.problem)
            self._on_models()


def _words(url: str, error: BaseException) -> str:
    problem = unreachable(url, error)
    return "nothing listens there" if isinstance(problem, NothingListens) else str(problem).replace(url, "it")


def _retry_after(text: str) -> float:
    return min(float(text), 60.0) if text.isascii() and text.isdigit() and len(text) < 6 else _RETRY_S
