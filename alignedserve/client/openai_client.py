"""Client of any OpenAI-compatible server: streams one completion and notes when its tokens came.

aiohttp and not httpx, because of what a token costs the client: 41 against 93 microseconds of CPU with 64 streams of
50 tokens per second (one core of a two-core virtual machine, both with the same JSON parsing).

When does a token count as arrived? When the chunk that shows it was read from the socket. How many tokens a chunk
holds is told by its logprobs, or by a `usage` object that comes with every chunk; else a chunk with text is one token.
The `usage` at the end, where the server sends one, overrules the sum for throughput and TPOT, never for the times."""

import asyncio
import enum
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
import msgspec

from alignedserve.client.sse import DONE, SseEvent, SseParser, error_code, error_message, is_key_wanted, read_chunk
from alignedserve.client.unreachable import trust_for, unreachable, untrusted
from alignedserve.config.environment import CLIENT_KEY_VARIABLE
from alignedserve.core.errors import ConfigError, PeerError, ProtocolError

CONNECT_TIMEOUT_S = 10.0
PLAIN_TIMEOUT_S = 30.0  # of requests that are not completions
MAX_ERROR_BODY_BYTES = 64 * 1024
_MAX_REASON_LEN = 120
_NUMBER = re.compile(r"\d+")
_QUOTED = re.compile("""["'`\u201c\u2018].*["'`\u201d\u2019]""")  # from the first mark to the last
TextListener = Callable[[str], None]


class Listeners(NamedTuple):
    """Called with each piece of a stream as it comes."""

    on_text: TextListener | None = None
    on_thought: TextListener | None = None


class CompletionApi(enum.Enum):
    """Completion interfaces of OpenAI."""

    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is CompletionApi.CHAT else "/v1/completions"


class ClientFailureKind(enum.Enum):
    """Ways a request can fail, as a client sees it."""

    CONNECT = "no connection"
    TIMEOUT = "timeout"
    HTTP = "http"  # refused with a status
    ERROR_EVENT = "error event"  # failed after the answer had begun, and said so
    DISCONNECTED = "disconnected"  # the stream ended without a finish reason
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True)
class ClientFailure:
    """Reason that a request did not complete."""

    kind: ClientFailureKind
    message: str
    status: int | None = None
    code: str | None = None  # the server's own, else its type of the error: of refusals and error events

    @property
    def label(self) -> str:
        return f"http {self.status}" if self.kind is ClientFailureKind.HTTP else self.kind.value

    @property
    def reason(self) -> str:
        """Return what the server said of it, for a report: without what it may have quoted of the request."""
        return self._told(_QUOTED.sub("…", " ".join(self.message.split())))

    @property
    def pattern(self) -> str:
        """Return the reason without its numbers: the same of requests that failed alike."""
        return self._told(_NUMBER.sub("N", _QUOTED.sub("…", " ".join(self.message.split()))))

    def _told(self, said: str) -> str:
        if self.kind not in (ClientFailureKind.HTTP, ClientFailureKind.ERROR_EVENT):
            return self.label
        shortened = said if len(said) <= _MAX_REASON_LEN else said[:_MAX_REASON_LEN] + "…"
        return f"{self.label}, {self.code or 'no code'}: {shortened}"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that a server lists."""

    name: str
    max_context_len: int | None = None  # tokens, where the server reports it (vLLM and AlignedServe do)
    sampling: Mapping[str, float] = field(default_factory=dict)  # server defaults, where reported
    sampling_source: str | None = None  # who says so; None: nobody but the API


@dataclass(slots=True)
class CompletionOutcome:
    """Outcome of one completion, filled while it runs; a cancelled completion keeps its tokens."""

    sent_s: float = 0.0
    ended_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)  # one entry per token; equal for tokens of one chunk
    text_parts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)  # JSON of each token's, where they were asked for
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None  # the server's own count
    num_cached_tokens: int = 0  # of the prompt, the server's own count
    num_output_tokens: int | None = None  # the server's own count
    failure: ClientFailure | None = None

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    @property
    def num_tokens(self) -> int:
        """Return output tokens: the server's count where it gave one."""
        return len(self.token_times_s) if self.num_output_tokens is None else self.num_output_tokens

    def num_tokens_since(self, since_s: float) -> int:
        """Return the output tokens that came at `since_s` or later: of chunks of several, an even share of all."""
        times = self.token_times_s
        return round(self.num_tokens * (1 - bisect_left(times, since_s) / len(times))) if times else 0


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One completion to ask for; `stream` and its options are added."""

    endpoint: CompletionApi
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


class OpenAiClient:
    """Async client of an OpenAI-compatible server, a context manager. Completions never raise for a server's faults:
    see CompletionOutcome.failure. `url` may end in /v1 or not. Raises ConfigError when it is no HTTP address."""

    def __init__(self, *, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: must begin with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0, ssl=trust_for(self.url) or True),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=256 * 1024,
            json_serialize=lambda body: msgspec.json.encode(body).decode(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    # --- completions --------------------------------------------------------------------------------------------------

    async def complete(
        self,
        call: CompletionCall,
        outcome: CompletionOutcome,
        on_text: TextListener | None = None,
        on_thought: TextListener | None = None,
    ) -> CompletionOutcome:
        """Stream one completion into `outcome`, which is also returned. Cancelling it closes the connection. The
        listeners get the pieces of the answer and of the thought before it."""
        outcome.sent_s = outcome.ended_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(call, outcome, Listeners(on_text, on_thought))
        except TimeoutError:
            outcome.failure = ClientFailure(ClientFailureKind.TIMEOUT, f"no end within {self._timeout_s:g} s")
        except aiohttp.ClientConnectorError as error:
            outcome.failure = ClientFailure(ClientFailureKind.CONNECT, untrusted(self.url, error) or str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            outcome.failure = ClientFailure(ClientFailureKind.DISCONNECTED, f"{type(error).__name__}: {error}")
        except ProtocolError as error:
            outcome.failure = ClientFailure(ClientFailureKind.MALFORMED, str(error))
        finally:
            outcome.ended_s = time.monotonic()
        return outcome

    async def _stream(self, call: CompletionCall, outcome: CompletionOutcome, listeners: Listeners) -> None:
        body = {**call.body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._open.post(self.url + call.endpoint.path, json=body, headers=call.headers) as response:
            if response.status != 200:
                error = await response.content.read(MAX_ERROR_BODY_BYTES)
                outcome.failure = ClientFailure(
                    ClientFailureKind.HTTP, error_message(error), response.status, error_code(error)
                )
                return
            parser = SseParser()
            async for received in response.content.iter_any():
                if not take_events(parser.feed(received), outcome, time.monotonic(), listeners):
                    break
        if outcome.finish_reason is None and outcome.failure is None:
            outcome.failure = ClientFailure(ClientFailureKind.DISCONNECTED, "the stream ended without a finish reason")

    # --- everything else ----------------------------------------------------------------------------------------------

    async def model_name(self) -> str:
        """Return the first model that the server lists. Raises PeerError."""
        return (await self.listed_model()).name

    async def listed_model(self) -> ListedModel:
        """Return the first model that the server lists. Raises PeerError."""
        return (await self.listed_models())[0]

    async def listed_models(self) -> tuple[ListedModel, ...]:
        """Return the models that the server lists, one at least. Raises PeerError."""
        try:
            listed = tuple(map(_listed_model, msgspec.json.decode(await self.get("/v1/models"))["data"]))
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"{self.url}/v1/models does not list models") from error
        if not listed:
            raise ProtocolError(f"{self.url}/v1/models lists no model")
        return listed

    async def get(self, path: str) -> bytes:
        """Return the body of a page. Raises PeerLost when nothing answers, PeerError on any status but 200."""
        try:
            async with asyncio.timeout(PLAIN_TIMEOUT_S), self._open.get(self.url + path) as response:
                body = await response.content.read(-1)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            raise unreachable(self.url, error) from error
        if is_key_wanted(response.status, error_code(body)):
            raise PeerError(f"{self.url} wants a key: set {CLIENT_KEY_VARIABLE} to one that it knows")
        if response.status != 200:
            raise PeerError(f"{self.url}{path} answered {response.status}: {error_message(body)}")
        return body

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the client is used outside its context"
        return self._session


_NOBODY = Listeners()


def _listed_model(listed: Any) -> ListedModel:
    max_context_len = listed.get("max_model_len")
    sampling = listed.get("default_sampling")
    settings = sampling if isinstance(sampling, dict) else {}
    numbers = {name: float(value) for name, value in settings.items() if isinstance(value, int | float)}
    source = settings.get("source")
    return ListedModel(
        str(listed["id"]),
        max_context_len if isinstance(max_context_len, int) else None,
        numbers,
        source if isinstance(source, str) and source else None,
    )


def take_events(
    events: Iterable[SseEvent], outcome: CompletionOutcome, now: float, listeners: Listeners = _NOBODY
) -> bool:
    """Note what the events say, up to the last of the stream; False when that was among them. Raises ProtocolError."""
    return all(_take_event(event, outcome, now, listeners) for event in events)


def _take_event(event: SseEvent, outcome: CompletionOutcome, now: float, listeners: Listeners) -> bool:
    if event.payload == DONE:
        return False
    chunk = read_chunk(event)
    if chunk.error is not None:
        outcome.failure = ClientFailure(ClientFailureKind.ERROR_EVENT, chunk.error, code=chunk.error_code)
        return False
    if chunk.has_token:
        count = len(chunk.logprobs) or 1
        if chunk.usage is not None:
            count = max(1, chunk.usage.completion_tokens - len(outcome.token_times_s))
        outcome.token_times_s.extend([now] * count)
        outcome.logprobs.extend(bytes(logprob) for logprob in chunk.logprobs)
    if chunk.thought and listeners.on_thought is not None:
        listeners.on_thought(chunk.thought)
    if chunk.text:
        outcome.text_parts.append(chunk.text)
        if listeners.on_text is not None:
            listeners.on_text(chunk.text)
    if chunk.finish_reason is not None:
        outcome.finish_reason = chunk.finish_reason
    if chunk.usage is not None:
        outcome.num_prompt_tokens = chunk.usage.prompt_tokens
        outcome.num_cached_tokens = chunk.usage.cached_tokens
        outcome.num_output_tokens = chunk.usage.completion_tokens
    return True
