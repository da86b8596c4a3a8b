"""Cuts the body of a message batch into requests as it arrives: a body of any size takes little memory.

A whole request is parsed later, within the bounds of every body; this module only finds its end."""

import re
from collections.abc import Generator
from typing import TypeVar

import orjson

from alignedserve.core.errors import InvalidRequest

_REQUESTS = "requests"
_BRACKET_OR_QUOTE = re.compile(rb'["{}\[\]]')
_QUOTE_OR_BACKSLASH = re.compile(rb'["\\]')
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")
_END_OF_SCALAR = re.compile(rb"[ \t\r\n,:\]}]")
_OPENING = b"{["
_QUOTE, _BACKSLASH = b'"', b"\\"
_MAX_OTHERS = 64  # members that are named

T = TypeVar("T")
# Yields a whole request, or None where more of the body is needed; then it goes on once that is there.
_Steps = Generator[bytes | None, None, T]


class RequestSplitter:
    """Reads `{"requests": [...]}` in pieces."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of a request, and of each other member."""
        self.others: list[str] = []  # names of the other members that are set
        self._max_bytes = max_bytes
        self._text = b""
        self._place = 0  # in it, of what comes next
        self._is_whole = False
        self._steps = self._body()

    def push(self, chunk: bytes) -> list[bytes]:
        """Return the requests that this piece of the body completes. Raises InvalidRequest."""
        self._text, self._place = self._text[self._place :] + chunk, 0
        requests = []
        while (request := next(self._steps)) is not None:
            requests.append(request)
        return requests

    def finish(self) -> None:
        """Raise InvalidRequest if the body has not come to its end."""
        if not self._is_whole:
            raise _not_json("it ends in the middle")

    def _body(self) -> _Steps[None]:
        yield from self._pass(b"{")
        if not (yield from self._passes(b"}")):
            yield from self._member()
            while not (yield from self._passes(b"}")):
                yield from self._pass(b",")
                yield from self._member()
        self._is_whole = True
        yield from self._next_byte()
        raise _not_json("there is more behind it")

    def _member(self) -> _Steps[None]:
        name = _parsed((yield from self._value()))
        if not isinstance(name, str):
            raise _not_json("the name of a member must be a string")
        yield from self._pass(b":")
        if name == _REQUESTS:
            yield from self._requests()
        elif _parsed((yield from self._value())) is not None and len(self.others) < _MAX_OTHERS:
            self.others.append(name)

    def _requests(self) -> _Steps[None]:
        if not (yield from self._passes(b"[")):
            raise InvalidRequest("requests must be a list.", param=_REQUESTS)
        if not (yield from self._passes(b"]")):
            yield (yield from self._value())
            while not (yield from self._passes(b"]")):
                yield from self._pass(b",")
                yield (yield from self._value())

    # --- values

    def _value(self) -> _Steps[bytes]:
        first = yield from self._next_byte()
        if first == _QUOTE:
            length = yield from self._end_of_string(1)
        elif first in _OPENING:
            length = yield from self._end_of_brackets()
        else:
            length = yield from self._find(_END_OF_SCALAR, 0)
        self._check(length)
        start, self._place = self._place, self._place + length
        return self._text[start : self._place]

    def _end_of_brackets(self) -> _Steps[int]:
        depth, length = 1, 1
        while depth:
            length = yield from self._find(_BRACKET_OR_QUOTE, length)
            byte = self._byte(length)
            length += 1
            if byte == _QUOTE:
                length = yield from self._end_of_string(length)
            else:
                depth += 1 if byte in _OPENING else -1
        return length

    def _end_of_string(self, length: int) -> _Steps[int]:
        while True:
            length = yield from self._find(_QUOTE_OR_BACKSLASH, length)
            if self._byte(length) == _QUOTE:
                return length + 1
            length += 2  # what stands behind a backslash ends nothing

    def _find(self, pattern: re.Pattern[bytes], length: int) -> _Steps[int]:
        while (match := pattern.search(self._text, self._place + length)) is None:
            length = max(length, len(self._text) - self._place)
            self._check(length)
            yield None
        return match.start() - self._place

    def _check(self, length: int) -> None:
        if length > self._max_bytes:
            raise InvalidRequest("A request is too large for a batch.", param=_REQUESTS)

    # --- marks

    def _next_byte(self) -> _Steps[bytes]:
        while (match := _NOT_SPACE.search(self._text, self._place)) is None:
            self._place = len(self._text)
            yield None
        self._place = match.start()
        return self._byte(0)

    def _byte(self, length: int) -> bytes:
        return self._text[self._place + length : self._place + length + 1]

    def _passes(self, mark: bytes) -> _Steps[bool]:
        is_there = (yield from self._next_byte()) == mark
        self._place += is_there
        return is_there

    def _pass(self, mark: bytes) -> _Steps[None]:
        if not (yield from self._passes(mark)):
            raise _not_json(f"a {mark.decode()} is missing")


def _parsed(raw: bytes) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _not_json(error.msg) from error


def _not_json(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The body is not valid JSON: {reason}.", code="invalid_json")
