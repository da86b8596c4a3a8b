"""What upstream servers say, read with care: nothing of it is trusted, all of it is bounded. No clock, no I/O."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import msgspec
import orjson

from alignedserve.core.errors import ProtocolError
from alignedserve.upstream.logic import Fingerprint

LOOP_HEADER = "x-alignedserve-door"  # the ids of the doors that a request came through
MAX_BODY_BYTES = 64 << 20  # of one whole answer
MAX_LIST_BYTES = 1 << 20
_MAX_EVENT_BYTES = 8 << 20
_MAX_MODELS = 256
_NAME = re.compile(r"[\x21-\x7e]{1,200}", re.ASCII)
_DONE = b"[DONE]"
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ENDS = frozenset({b"event: message_stop", b"event: response.completed", b"event: response.incomplete"})
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')
_SAYS = re.compile(rb'"(content|text|delta|reasoning_content|reasoning|arguments|partial_json)"\s*:\s*"[^"]')
_BLANK = re.compile(rb"\r?\n\r?\n")
_MARKS = re.compile(
    rb'"usage"\s*:\s*\{|"finish_reason"\s*:\s*"|"error"\s*:|\[DONE\]|event:|message_stop|response\.completed'
)
_BEGINNING, _MAX_BEGINNINGS = 1024, 32  # characters; beginnings of one prompt
_TEMPLATE_TOKENS = 4096  # that a chat template may add to a prompt
_CHAT_PATHS = ("/v1/chat/completions", "/v1/completions")
# Codes of errors that mean the same everywhere, and so may be told to clients.
_KNOWN_CODES = frozenset({"context_length_exceeded", "model_not_found", "invalid_value", "unsupported_parameter"})
_TOO_LONG = re.compile(rb"context (length|size|window)|max_model_len|maximum context", re.IGNORECASE)
PROBE_TEXT = "Probe 0123456789: \u00e9\u6c34 ([{<>}]) antidisestablishmentarianism; say yes."


# --- models


class _Meta(msgspec.Struct):
    n_params: int | None = None


class _Listed(msgspec.Struct):
    id: str
    owned_by: str = ""
    root: str | None = None
    max_model_len: int | None = None
    meta: _Meta | None = None


class _List(msgspec.Struct):
    data: list[_Listed]


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """A model as an upstream lists it."""

    name: str
    owner: str  # the kind of server, where it says so: vllm, alignedserve, llamacpp
    max_context_len: int | None
    fingerprint: Fingerprint


def read_models(body: bytes) -> list[UpstreamModel]:
    """Return the models that a server lists. Raises ProtocolError."""
    try:
        listed = msgspec.json.decode(body, type=_List).data
    except msgspec.MsgspecError as error:
        raise ProtocolError("it does not list models as OpenAI's API does") from error
    return [_model(item) for item in listed[:_MAX_MODELS] if _NAME.fullmatch(item.id)]


def _model(item: _Listed) -> UpstreamModel:
    root = PurePath(item.root).name if item.root else None
    fingerprint = Fingerprint(root, item.meta.n_params if item.meta is not None else None)
    length = item.max_model_len if item.max_model_len is not None and 0 < item.max_model_len < 1 << 40 else None
    return UpstreamModel(item.id, item.owned_by, length, fingerprint)


# --- requests


@dataclass(slots=True)
class Manners:
    """What one upstream takes beyond OpenAI's API."""

    owner: str = ""
    takes_additions: bool = True  # until it refuses them
    takes_terms: bool = False  # our scheduler is inside: classes, objectives and tenants go down in vllm_xargs


def body_for(
    fields: Mapping[str, Any], manners: Manners, path: str, *, is_document: bool, terms: Mapping[str, Any] | None = None
) -> tuple[bytes, bool]:
    """Return the body as this upstream is to get it, and whether anything was added to the client's.

    `terms`: of the request, for our scheduler.
    """
    body = dict(fields)
    if manners.takes_terms and path in _CHAT_PATHS:
        sent = body.get("vllm_xargs")
        body["vllm_xargs"] = {**(sent if isinstance(sent, dict) else {}), **(terms or {})}
    if manners.owner != "alignedserve":
        body.pop("service_tier", None)
    if manners.takes_additions:
        if body.get("stream") and path in _CHAT_PATHS:
            options = body.get("stream_options")
            body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        if is_document and manners.owner == "vllm":
            body.setdefault("priority", 10)
        return orjson.dumps(body), body.keys() != fields.keys() or bool(body.get("stream"))
    return orjson.dumps(body), False


def wants_usage(fields: Mapping[str, Any]) -> bool:
    options = fields.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def prompt_of(fields: Mapping[str, Any]) -> bytes:
    """Return what the prompt of any API begins with, in one form."""
    named = ("instructions", "system", "tools", "messages", "prompt", "input", "query", "documents", "text_1", "text_2")
    return b"".join(orjson.dumps(fields[name]) for name in named if fields.get(name))


def beginnings_of(prompt: bytes, model: str, tenant: str) -> tuple[int, ...]:
    """Return names of the beginnings of a prompt, the shortest first; clients share none."""
    digest, names = hashlib.blake2b(f"{model}\0{tenant}".encode(), digest_size=8), []
    for start in range(0, min(len(prompt) - _BEGINNING, _BEGINNING * _MAX_BEGINNINGS), _BEGINNING):
        digest.update(prompt[start : start + _BEGINNING])
        names.append(int.from_bytes(digest.digest()))
    return tuple(names)


# --- answers


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    error: msgspec.Raw = msgspec.Raw()

    @property
    def is_error(self) -> bool:
        return bytes(self.error) not in (b"", b"null")


_CHUNK = msgspec.json.Decoder(_Chunk)
# Names of no text: there the marks before and after would be escaped.
_COUNTS = re.compile(rb'"(prompt|completion|input|output|cached)_tokens"\s*:\s*(-?\d{1,18})(?!\d)')


@dataclass(slots=True)
class AnswerUsage:
    """Tokens of one answer: what the upstream says, where that can be true, else what was counted."""

    likely_prompt: int
    most_prompt: int
    num_events: int = 0  # with something of the answer
    num_bytes: int = 0
    said: dict[bytes, int] = field(default_factory=dict)

    @classmethod
    def of(cls, prompt: bytes) -> "AnswerUsage":
        return cls(len(prompt) // 4 + 1, len(prompt) + _TEMPLATE_TOKENS)

    def note(self, answer: bytes) -> None:
        self.said |= {match[1]: int(match[2]) for match in _COUNTS.finditer(answer)}

    @property
    def prompt_tokens(self) -> int:
        said = self.said.get(b"prompt", self.said.get(b"input", 0))
        return said if 0 < said <= self.most_prompt else self.likely_prompt

    @property
    def output_tokens(self) -> int:
        said = self.said.get(b"completion", self.said.get(b"output", -1))
        return said if min(self.num_events, 1) <= said <= self.num_bytes + 1 else self.num_events

    @property
    def cached_tokens(self) -> int:
        return min(max(self.said.get(b"cached", 0), 0), self.prompt_tokens)


def read_whole(body: bytes, usage: AnswerUsage) -> None:
    """Note the usage of a whole answer. Raises ProtocolError for anything but a JSON object without an error."""
    usage.num_bytes = len(body)
    try:
        chunk = _CHUNK.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError("its answer is no object of OpenAI's API") from error
    if chunk.is_error:
        raise ProtocolError("its answer is an error with the status of a success")
    usage.note(body)


class EventCutter:
    """Cuts a stream of events where events end, so that no half of one is passed on; keeps what is not the client's."""

    def __init__(self, usage: AnswerUsage, *, shows_usage: bool) -> None:
        self._usage = usage
        self._shows_usage = shows_usage
        self._rest = b""
        self.is_complete = False  # the stream said that it is at its end
        self.is_done = False  # in OpenAI's way
        self.problem = ""  # after which nothing more of it is passed on

    def feed(self, received: bytes) -> bytes:
        """Return whole events. Raises ProtocolError for an endless one; see `problem`."""
        received = self._rest + received if self._rest else received
        end = max(received.rfind(b"\n\n") + 2, received.rfind(b"\n\r\n") + 3)
        if end < 3:
            self._hold(received)
            return b""
        events = received[:end] if end < len(received) else received
        self._hold(received[end:])
        if _MARKS.search(events) is None:
            count = events.count(b"\ndata:") + events.startswith(b"data:")
            self._usage.num_events += count
            self._usage.num_bytes += len(events)
            return events
        return b"".join(self._read_all(events))

    def _read_all(self, events: bytes) -> Iterator[bytes]:
        for event in _BLANK.split(events):
            try:
                yield self._read(event) if event.strip() and not self.problem else b""
            except ProtocolError as error:
                self.problem = str(error)

    def _hold(self, rest: bytes) -> None:
        if len(rest) > _MAX_EVENT_BYTES:
            raise ProtocolError("it sent an endless event")
        self._rest = rest

    def _read(self, event: bytes) -> bytes:
        lines = event.replace(b"\r\n", b"\n").split(b"\n")
        payload = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        if payload == _DONE:
            self.is_complete = self.is_done = True
            return event + b"\n\n"
        if not payload:
            return event + b"\n\n"
        try:
            chunk = _CHUNK.decode(payload)
        except msgspec.MsgspecError as error:
            raise ProtocolError("an event of its stream is no JSON object") from error
        if chunk.is_error or b"event: error" in lines:
            raise ProtocolError("its stream ended with an error")
        if _USAGE.search(payload) is not None:
            self._usage.note(payload)
            if chunk.choices == [] and not self._shows_usage:
                return b""
        self.is_complete |= not _ENDS.isdisjoint(lines) or any(map(_FINISHED.search, chunk.choices or ()))
        self._usage.num_events += _SAYS.search(payload) is not None
        self._usage.num_bytes += len(payload)
        return event + b"\n\n"


_NOTHING_YET = re.compile(
    rb'^data:\s*\{(?=.*"delta"\s*:\s*\{\s*("role"\s*:\s*"assistant"\s*,?\s*)?("content"\s*:\s*(""|null)\s*,?\s*)?\})',
    re.DOTALL,
)


def says_nothing(events: bytes) -> bool:
    """Return whether an answer has only begun: its first event names the speaker, and has no text yet."""
    return events.count(b"data:") == 1 and _NOTHING_YET.match(events) is not None


def known_code(body: bytes) -> str | None:
    """Return the code of an error where it means the same everywhere; no other word of an upstream is repeated."""
    if _TOO_LONG.search(body):
        return "context_length_exceeded"
    return next((code for code in sorted(_KNOWN_CODES) if f'"{code}"'.encode() in body), None)
