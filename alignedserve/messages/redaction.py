"""Removes the tokens of prompts and answers from recorded events and commands.

A logic uses token ids for three things only: their number, whether one ends an answer, and whether two attempts at a
request generated the same. Redacted copies keep just that, so that the same decisions follow.
"""

import dataclasses
import hashlib
import typing
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from alignedserve.core.request import Request, SampledToken, TokenLogprob
from alignedserve.messages.gateways import TokenDelta
from alignedserve.messages.wire import Message

_GENERATED = "generated_token_ids"
_NO_LOGPROB = TokenLogprob(0, 0.0)
_ONE_TOKEN = (0,)
_HASHED_BYTES = 4
_MAX_TOKEN = (1 << 31) - 1


class RedactionPolicy(Protocol):
    """Replaces token ids."""

    def observe(self, request: Request) -> None:
        """Take note of a request whose tokens may follow."""

    def generated(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return a replacement for the tokens of an answer so far."""

    def sampled(self, token_id: int) -> int:
        """Return a replacement for one new token."""


class KeepLengths:
    """Keeps the number of tokens and nothing else."""

    def observe(self, request: Request) -> None:
        """See RedactionPolicy."""

    def generated(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """See RedactionPolicy."""
        return (0,) * len(token_ids)

    def sampled(self, token_id: int) -> int:
        """See RedactionPolicy."""
        return 0


class KeepDecisions:
    """Keeps what decisions depend on: tokens that end answers, and the equality of answers.

    `secret`: the key of the hashes; discard it, or answers could be guessed and compared.
    """

    def __init__(self, eos_token_ids: frozenset[int], secret: bytes) -> None:
        self._kept = set(eos_token_ids)
        self._secret = secret
        self._other = -1  # in place of every other token: an id that no model has

    def observe(self, request: Request) -> None:
        """See RedactionPolicy. Tokens that end one answer are kept in all."""
        stops = request.sampling.stop_token_ids
        if stops:
            self._kept.update(stops)
            while self._other in self._kept:
                self._other -= 1

    def generated(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """See RedactionPolicy. Hashes each id with its position, as only the beginning of some answers is compared."""
        return tuple(self._hashed(index, token_id) for index, token_id in enumerate(token_ids))

    def sampled(self, token_id: int) -> int:
        """See RedactionPolicy."""
        return token_id if token_id in self._kept else self._other

    def _hashed(self, index: int, token_id: int) -> int:
        place = index.to_bytes(8, "little") + token_id.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(place, digest_size=_HASHED_BYTES, key=self._secret).digest()
        return int.from_bytes(digest, "little") & _MAX_TOKEN


class Redactor:
    """Makes redacted copies of any event, command or message; one without token ids is returned as it is."""

    def __init__(self, policy: RedactionPolicy) -> None:
        self._policy = policy
        self._copies: dict[type, Callable[[Any], Any]] = {
            Request: self._request,
            SampledToken: self._sampled,
            TokenLogprob: lambda _: _NO_LOGPROB,
            TokenDelta: self._delta,
            tuple: self._all,
        }

    def __call__(self, value: Any) -> Any:
        """Return the redacted copy."""
        return self._copy_of(type(value))(value)

    def _copy_of(self, kind: type) -> Callable[[Any], Any]:
        copy = self._copies.get(kind)
        if copy is None:
            copy = self._copies[kind] = self._copier(kind)
        return copy

    def _copier(self, kind: type) -> Callable[[Any], Any]:
        names = _field_names(kind)
        parts = {name for name in names if name == _GENERATED or _reaches_tokens(_annotation(kind, name), frozenset())}
        if not parts:
            return _itself
        return lambda value: kind(*[self._part(value, name, name in parts) for name in names])

    def _part(self, value: Any, name: str, is_redacted: bool) -> Any:
        part = getattr(value, name)
        if not is_redacted:
            return part
        return self._policy.generated(part) if name == _GENERATED else self(part)

    def _all(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copy a tuple, whose values are all of one class, or hold no tokens."""
        if not values:
            return values
        copy = self._copy_of(type(values[0]))
        return tuple([copy(value) for value in values])

    def _request(self, request: Request) -> Request:
        self._policy.observe(request)
        sampling = request.sampling
        if sampling.logit_bias:
            sampling = dataclasses.replace(sampling, logit_bias=())
        return dataclasses.replace(request, prompt_token_ids=(0,) * request.prompt_len, sampling=sampling)

    def _sampled(self, token: SampledToken) -> SampledToken:
        logprob = None if token.logprob is None else _NO_LOGPROB
        return SampledToken(token.request_id, self._policy.sampled(token.token_id), logprob)

    def _delta(self, delta: TokenDelta) -> TokenDelta:
        token_ids = _ONE_TOKEN if len(delta.token_ids) == 1 else (0,) * len(delta.token_ids)
        logprobs = (_NO_LOGPROB,) * len(delta.logprobs) if delta.logprobs else ()
        return TokenDelta(delta.request_id, delta.first_index, token_ids, logprobs, delta.finish_reason)


def _itself(value: Any) -> Any:
    return value


def _field_names(kind: type) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return tuple(field.name for field in msgspec.structs.fields(kind))
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return ()


def _annotation(kind: type, name: str) -> Any:
    return typing.get_type_hints(kind)[name]


def _reaches_tokens(annotation: Any, above: frozenset[type]) -> bool:
    """Return True if a value of this type may hold tokens, at any depth. `above`: the enclosing classes."""
    if typing.get_args(annotation):
        return any(_reaches_tokens(argument, above) for argument in typing.get_args(annotation))
    if not isinstance(annotation, type) or annotation in above:
        return False
    if annotation in (Request, SampledToken, TokenLogprob, TokenDelta, Message):
        return True
    return any(
        name == _GENERATED or _reaches_tokens(_annotation(annotation, name), above | {annotation})
        for name in _field_names(annotation)
    )
