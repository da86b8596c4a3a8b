"""Server-sent events and the JSON chunks in them, parsed by hand: measuring must cost less than what it measures."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from alignedserve.core.errors import ProtocolError

MAX_EVENT_BYTES = 16 * 1024 * 1024
DONE = b"[DONE]"


class SseEvent(NamedTuple):
    """One event; most have no name."""

    payload: bytes
    name: bytes = b""


class SseParser:
    """Parser with bytes in and events out. A trailing event without its blank line is never given out (the stream was
    cut)."""

    def __init__(self) -> None:
        self._rest = b""
        self._payload: list[bytes] = []
        self._name = b""

    def feed(self, received: bytes) -> list[SseEvent]:
        """Return the events that `received` completes. Raises ProtocolError on an endless line."""
        lines = (self._rest + received).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ProtocolError("the server sent an event larger than 16 MiB")
        events: list[SseEvent] = []
        for line in lines:
            self._take_line(line.removesuffix(b"\r"), events)
        return events

    def _take_line(self, line: bytes, events: list[SseEvent]) -> None:
        if line.startswith(b"data:"):
            self._payload.append(line[5:].removeprefix(b" "))
        elif not line:
            if self._payload:
                events.append(SseEvent(b"\n".join(self._payload), self._name))
            self._payload, self._name = [], b""
        elif line.startswith(b"event:"):
            self._name = line[6:].strip()


# --- OpenAI's chunks -------------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Parts of a prompt's tokens."""

    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct, frozen=True):
    """Token counts as the server states them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from the server's prefix cache; 0 where it does not tell."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details is not None else 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None  # a thought, under the name of most servers
    reasoning: str | None = None  # and of others


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None  # chat: one entry per token
    tokens: list[msgspec.Raw] | None = None  # completions: one entry per token


class _ChoiceJson(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _ChunkJson(msgspec.Struct):
    choices: list[_ChoiceJson] = []
    usage: StreamUsage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _ErrorBody(msgspec.Struct):
    message: str = ""
    type: str | None = None
    code: str | int | None = None


class _ErrorEnvelope(msgspec.Struct):
    error: _ErrorBody | str = ""
    message: str = ""


class StreamChunk(NamedTuple):
    """Content of one event."""

    text: str = ""
    has_token: bool = False  # text, thoughts or logprobs came with it
    logprobs: Sequence[msgspec.Raw] = ()  # of each token, as it came; none if it has none
    finish_reason: str | None = None
    usage: StreamUsage | None = None
    error: str | None = None
    error_code: str | None = None
    thought: str = ""


_decode_chunk = msgspec.json.Decoder(_ChunkJson).decode
_decode_envelope = msgspec.json.Decoder(_ErrorEnvelope).decode


def read_chunk(event: SseEvent) -> StreamChunk:
    """Return the chunk in an event. Raises ProtocolError when it is not one."""
    if event.name == b"error":
        return _failed(event)
    try:
        chunk = _decode_chunk(event.payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a completion chunk: {event.payload[:120]!r} ({error})") from error
    if bytes(chunk.error) not in (b"", b"null"):
        return _failed(event)
    if not chunk.choices:
        return StreamChunk(usage=chunk.usage)
    return _from_choice(chunk.choices[0], chunk.usage)


def _failed(event: SseEvent) -> StreamChunk:
    return StreamChunk(error=error_message(event.payload), error_code=error_code(event.payload))


def _from_choice(choice: _ChoiceJson, usage: StreamUsage | None) -> StreamChunk:
    text, thought = choice.text or "", ""
    if choice.delta is not None:
        delta = choice.delta
        text, thought = delta.content or "", delta.reasoning_content or delta.reasoning or ""
    logprobs: Sequence[msgspec.Raw] = ()
    if choice.logprobs is not None:
        logprobs = choice.logprobs.content or choice.logprobs.tokens or ()
    has_token = bool(text or thought or logprobs)
    return StreamChunk(text, has_token, logprobs, choice.finish_reason, usage, thought=thought)


def error_message(body: bytes) -> str:
    try:
        envelope = _decode_envelope(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode("utf-8", errors="replace").strip()
    if isinstance(envelope.error, str):
        return envelope.error or envelope.message or body[:200].decode("utf-8", errors="replace")
    return envelope.error.message or envelope.error.type or "an error without a message"


def is_key_wanted(status: int | None, code: str | None) -> bool:
    """Return whether an answer asks for another key: a gateway's 403 says by its code what this key may not do."""
    return status == 401 or (status == 403 and code is None)


def error_code(body: bytes) -> str | None:
    """Return the code of an OpenAI error object, such as context_length_exceeded, or else its type, if it has one."""
    try:
        envelope = _decode_envelope(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(envelope.error, str):
        return None
    return envelope.error.code if isinstance(envelope.error.code, str) else envelope.error.type
