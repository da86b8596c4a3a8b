"""Reads the bodies of requests: short ones here, longer ones on threads, the longest in a process of their own."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from alignedserve.api.endpoints import GeneratingEndpoint, TokenEndpoint
from alignedserve.api.errors import BodyTooLarge, BodyTooSlow, ClientDisconnected, WrongContentType
from alignedserve.api.models.model_registry import usable_cards
from alignedserve.api.openai.parsing import parse_json
from alignedserve.api.openai.prompt_encoding import Prompts
from alignedserve.api.openai.request_builder import likely_class
from alignedserve.api.schema import IgnoredFields
from alignedserve.api.work_lanes import LONG_LEN, SHORT_LEN, note_class
from alignedserve.core.errors import InvalidRequest
from alignedserve.gateway.call import Call
from alignedserve.gateway.files.uploads import arriving
from alignedserve.gateway.logs import LONGEST_LOGGED, log_body
from alignedserve.gateway.long_bodies.messages import (
    CountedTokens,
    NotRead,
    ReadBody,
    ReadingTask,
    Refusal,
    decode_outcome,
)
from alignedserve.gateway.long_bodies.messages import encode as encoded
from alignedserve.gateway.services import Services
from alignedserve.keys.entry import KeyEntry

_BODY_TIMEOUT_S = 30.0
_PIECE_BYTES = 64 * 1024  # of what was compressed

BodyT = TypeVar("BodyT")

_GZIP_BITS = 16 + zlib.MAX_WBITS
_GZIP = ("gzip", "x-gzip")
_KNOWN = ("", "identity", *_GZIP)


async def read_body(call: Call, parse: Callable[[dict[str, Any]], BodyT]) -> BodyT:
    """Return the body, parsed by `parse`: a long one beside the loop. Raises InvalidRequest, Overloaded."""
    return await parsed(await receive(call), call.services, parse)


async def read_prompts(call: Call, endpoint: GeneratingEndpoint[BodyT]) -> tuple[BodyT, Prompts | None]:
    """Return the body; of a long one, which another process reads, the prompts too, and a short stand-in in the body.

    Raises InvalidRequest, Overloaded.
    """
    raw = await receive(call)
    outcome = await read_if_long(raw, endpoint.path, call.services, call.ignored, call.key)

    def parse(fields: dict[str, Any]) -> BodyT:
        return endpoint.parse(fields, call.ignored)

    if not isinstance(outcome, ReadBody):
        return await parsed(raw, call.services, parse), None
    return await parsed(outcome.body, call.services, parse), outcome.unpacked()


async def read_and_answer(
    call: Call, endpoint: TokenEndpoint[BodyT], answer: Callable[[BodyT], Awaitable[bytes]]
) -> bytes:
    """Return the answer to a body about tokens alone; another process answers a long one.

    Raises InvalidRequest, Overloaded.
    """
    raw = await receive(call)
    outcome = await read_if_long(raw, endpoint.path, call.services, call.ignored, call.key)
    if isinstance(outcome, CountedTokens):
        return outcome.answer
    return await answer(await parsed(raw, call.services, lambda fields: endpoint.parse(fields, call.ignored)))


async def read_if_long(
    raw: bytes, path: str, services: Services, ignored: IgnoredFields | None, key: KeyEntry
) -> ReadBody | CountedTokens | None:
    """Return what another process read of a long body; None: the body is short, or this process has to read it.

    `ignored`: gets the fields that are ignored; None: they are refused. Raises InvalidRequest, Overloaded.
    """
    if len(raw) <= LONG_LEN:
        return None
    outcome = decode_outcome(await services.work_process.answer(encoded(task_of(path, services, key)), raw))
    if isinstance(outcome, NotRead):
        return None
    if ignored is not None:
        for name in outcome.ignored:
            ignored.add(name)
    if isinstance(outcome, Refusal):
        raise outcome.error()
    return outcome


def task_of(path: str, services: Services, key: KeyEntry) -> ReadingTask:
    """Describe the reading of a body; models that the key may not use are unknown there."""
    models = services.models
    bases = {card.name: models.base_of(card.name) for card in usable_cards(models, key)}
    known = set(bases.values())  # also of adapters and aliases alone
    loaded = tuple(model.card for model in models.all if model.services is not None and model.card.name in known)
    places = {card.name: index for index, card in enumerate(loaded)}
    named = {name: places[base] for name, base in bases.items() if base in places}
    return ReadingTask(path, services.config, loaded, named, places.get(next(iter(bases.values()), "")))


async def receive(call: Call) -> bytes:
    """Return the body as JSON, decompressed, and note its likely class. Raises InvalidRequest, Overloaded."""
    config, encoding = call.services.config, call.http.headers.get("content-encoding", "")
    check_encoding(encoding)
    _check_declared(call.http, config.max_body_bytes)
    raw = await _read_body(call, config.max_body_bytes)
    if encoding:
        note_class(likely_class(b"", call.key))  # by its key alone
        sent = raw
        raw = await call.services.lanes.run(SHORT_LEN + 1, lambda: decoded(sent, encoding, config.max_body_bytes))
    log_body(raw, call.http.headers, config)
    note_class(likely_class(raw, call.key))
    return raw


async def body_chunks(call: Call, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield a large JSON body as it arrives, decompressed.

    `max_bytes`: of the whole. Raises InvalidRequest.
    """
    http, config = call.http, call.services.config
    encoding = http.headers.get("content-encoding", "")
    check_encoding(encoding)
    _check_declared(http, max_bytes)
    num_bytes, beginning, num_held = 0, b"", 0
    async for chunk in _unpacked(arriving(http)) if encoding.strip().lower() in _GZIP else arriving(http):
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
        if call.body is not None and num_held < config.max_body_bytes:  # no more of it is kept until its end
            more = min(len(chunk), config.max_body_bytes - num_held)
            call.body.hold(more)
            num_held += more
        if len(beginning) <= LONGEST_LOGGED:
            beginning += chunk
        yield chunk
    log_body(beginning, http.headers, config, num_bytes)


async def _unpacked(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what was compressed in pieces of a bounded size, however much a chunk makes."""
    gzip = zlib.decompressobj(_GZIP_BITS)
    async for chunk in chunks:
        rest = chunk
        while rest:
            try:
                piece = gzip.decompress(rest, _PIECE_BYTES)
            except zlib.error as error:
                raise _not_gzip() from error
            if gzip.unused_data:
                raise _not_one_member()
            if piece:
                yield piece
            rest = gzip.unconsumed_tail
    if not gzip.eof:
        raise _not_one_member()


async def parsed(raw: bytes, services: Services, parse: Callable[[dict[str, Any]], BodyT]) -> BodyT:
    """Return the body, parsed by `parse`: a long one on a thread. Raises InvalidRequest, Overloaded."""
    return await services.lanes.run(len(raw), lambda: parse(parse_json(raw, services.config)))


def _check_declared(http: Request, limit: int) -> None:
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # Also keeps other sites' pages from posting here: JSON needs a preflight, answered for cors_origins alone.
        raise WrongContentType("The Content-Type header must be application/json.")
    length = http.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise BodyTooLarge(f"The body is larger than {limit} bytes.")


async def _read_body(call: Call, limit: int) -> bytes:
    chunks, size = [], 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for chunk in call.http.stream():
                size += len(chunk)
                if size > limit:
                    raise BodyTooLarge(f"The body is larger than {limit} bytes.")
                if call.body is not None:
                    call.body.hold(len(chunk))
                chunks.append(chunk)
    except TimeoutError as error:
        raise BodyTooSlow("The body did not arrive in time.") from error
    except ClientDisconnect as error:
        raise ClientDisconnected("The client disconnected before its body was complete.") from error
    return b"".join(chunks)


def check_encoding(encoding: str) -> None:
    """Raise WrongContentType for an encoding that is not read. `encoding`: the header's value."""
    if encoding.strip().lower() not in _KNOWN:
        raise WrongContentType("The Content-Encoding header must be gzip, or be left out.")


def decoded(raw: bytes, encoding: str, limit: int) -> bytes:
    """Return the body as it was before the client encoded it; no more than `limit` bytes are ever made of it.

    Raises BodyTooLarge, WrongContentType, InvalidRequest.
    """
    check_encoding(encoding)
    if encoding.strip().lower() not in _GZIP:
        return raw
    gzip = zlib.decompressobj(_GZIP_BITS)
    try:
        body = gzip.decompress(raw, limit + 1)
    except zlib.error as error:
        raise _not_gzip() from error
    if len(body) > limit:
        raise BodyTooLarge(f"The body is larger than {limit} bytes.")
    if not gzip.eof or gzip.unused_data:
        raise _not_one_member()
    return body


def _not_gzip() -> InvalidRequest:
    return InvalidRequest("The body is not valid gzip.", code="invalid_encoding")


def _not_one_member() -> InvalidRequest:
    return InvalidRequest("The body is not one whole gzip member.", code="invalid_encoding")
