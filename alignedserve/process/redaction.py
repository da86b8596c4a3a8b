"""Removes the tokens of prompts and answers from recorded events and commands.

A logic uses token ids for four things only: their number, whether one ends an answer, whether two attempts at a request
generated the same, and where contexts that may share cached blocks stop being equal (TokenChains). Redacted copies
keep just that, so that the same decisions follow.
"""

import dataclasses
import hashlib
import typing
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from alignedserve.core.ids import RequestId
from alignedserve.core.request import LoraAdapter, Request, SampledToken, TokenLogprob
from alignedserve.messages.gateways import TokenDelta
from alignedserve.messages.prefixes import HASH_BYTES, FindPrefix, PrefixBlock, PrefixFound, PrefixPart
from alignedserve.messages.wire import Message

MAX_TOKENS = 1 << 22  # of contexts that are known at a time, 8 bytes each; the oldest are forgotten
_CHAIN_DIGEST_BYTES = 16
_FIRST_REPLACEMENT = 1 << 30  # replacements of chained tokens are at least this: ids that no model has
_GENERATED = "generated_token_ids"
_NO_LOGPROB = TokenLogprob(0, 0.0)
_ONE_TOKEN = (0,)
_LEFT_OUT = "redacted"  # in place of an adapter's name and path
_SOME_GRAMMAR = "redacted"  # that there is one says when an answer ends, see finish_reason
_HASHED_BYTES = 4
_DIGEST_BYTES = 32
_MAX_TOKEN = (1 << 31) - 1
# Classes with tokens; those of blocks are packed.
_HOLDERS = (Request, SampledToken, TokenLogprob, TokenDelta, PrefixBlock, PrefixPart, FindPrefix, PrefixFound)


@dataclass(slots=True)
class _Chain:
    digest: bytes
    stops: frozenset[int]
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    replaced: "array[int]" = field(default_factory=lambda: array("i"))


class TokenChains:
    """The contexts of requests by id, token by token. Tokens in `kept_tokens` are replaced by themselves.

    Decisions about contexts that may share cached blocks depend on where two of them stop being equal, and on nothing
    else. So a token is replaced by a digest of everything up to it, under a secret that is thrown away: equal
    beginnings stay equal, of what follows nothing can be told, and no token can be guessed by itself.
    """

    def __init__(self, secret: bytes, kept_tokens: frozenset[int], *, max_tokens: int = MAX_TOKENS) -> None:
        self._secret = secret
        self._kept = kept_tokens
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._chains: dict[RequestId, _Chain] = {}  # the oldest first

    def begin(self, request: Request) -> tuple[int, ...]:
        """Begin the context of a request, anew if it has one; return the replacement for its prompt."""
        self._forget(request.request_id)
        while self._chains and self._num_tokens + request.prompt_len > self._max_tokens:
            self._forget(next(iter(self._chains)))
        stops = frozenset(request.sampling.stop_token_ids)
        self._chains[request.request_id] = _Chain(self._digest(request.prefix_root), stops)
        return self.extend(request.request_id, request.cache_keys) or ()

    def extend(self, request_id: RequestId | None, token_ids: Iterable[int]) -> tuple[int, ...] | None:
        """Add tokens to a context; return their replacements, None if it is not known."""
        chain = self._chains.get(request_id) if request_id is not None else None
        return None if chain is None else tuple([self._replacement(chain, token_id) for token_id in token_ids])

    def sampled(self, request_id: RequestId, token_id: int) -> int | None:
        """Add a new token, which may end the answer and is then kept; None: the context is not known."""
        chain = self._chains.get(request_id)
        if chain is None:
            return None
        replaced = self._replacement(chain, token_id)
        return token_id if token_id in chain.stops else replaced

    def packed(self, request_id: RequestId, blocks: Sequence[bytes]) -> tuple[bytes, ...] | None:
        """Return the replacements for packed tokens of consecutive blocks of a context; None: they are not its own."""
        chain, whole = self._chains.get(request_id), b"".join(blocks)
        if chain is None or not whole:
            return None
        tokens, replaced = chain.token_ids.tobytes(), chain.replaced.tobytes()
        at = tokens.find(whole)
        while at >= 0 and at % len(blocks[0]):
            at = tokens.find(whole, at + 1)
        if at < 0:
            return None
        size = len(blocks[0])
        return tuple([replaced[at + number * size : at + (number + 1) * size] for number in range(len(blocks))])

    def _replacement(self, chain: _Chain, token_id: int) -> int:
        chain.digest = digest = self._digest(chain.digest + _as_bytes(token_id))
        replaced = token_id
        if token_id not in self._kept:
            replaced = _FIRST_REPLACEMENT | int.from_bytes(digest[:4], "little") & (_FIRST_REPLACEMENT - 1)
        chain.token_ids.append(token_id & _MAX_TOKEN)
        chain.replaced.append(replaced & _MAX_TOKEN)
        self._num_tokens += 1
        return replaced

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=_CHAIN_DIGEST_BYTES, key=self._secret).digest()

    def _forget(self, request_id: RequestId) -> None:
        chain = self._chains.pop(request_id, None)
        if chain is not None:
            self._num_tokens -= len(chain.token_ids)


class RedactionPolicy(Protocol):
    """Replaces token ids."""

    def prompt(self, request: Request) -> tuple[int, ...]:
        """Return a replacement for the prompt of a request, whose other tokens may follow."""

    def generated(self, request_id: RequestId | None, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return a replacement for the tokens of an answer so far; with an id, of the request whose prompt came last.

        That prompt and these tokens are its whole context.
        """

    def sampled(self, request_id: RequestId, token_id: int) -> int:
        """Return a replacement for one new token."""

    def packed(self, request_id: RequestId | None, blocks: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return replacements for the packed tokens of consecutive blocks, of a request's context if there is an id."""

    def hashes(self, hashes: bytes) -> bytes:
        """Return a replacement for hashes of blocks, one after the other."""


class KeepLengths:
    """Keeps the number of tokens and nothing else."""

    def prompt(self, request: Request) -> tuple[int, ...]:
        return (0,) * request.prompt_len

    def generated(self, request_id: RequestId | None, token_ids: Sequence[int]) -> tuple[int, ...]:
        return (0,) * len(token_ids)

    def sampled(self, request_id: RequestId, token_id: int) -> int:
        return 0

    def packed(self, request_id: RequestId | None, blocks: Sequence[bytes]) -> tuple[bytes, ...]:
        return tuple([bytes(len(tokens)) for tokens in blocks])

    def hashes(self, hashes: bytes) -> bytes:
        return bytes(len(hashes))


class KeepDecisions:
    """Keeps what decisions depend on: tokens that end answers, and the equality of answers and of beginnings.

    `secret`: the key of the hashes; discard it, or answers could be guessed and compared.
    """

    def __init__(self, eos_token_ids: frozenset[int], secret: bytes) -> None:
        self._kept = set(eos_token_ids)
        self._secret = secret
        self._other = -1  # in place of every other token: an id that no model has
        self._chains = TokenChains(secret, eos_token_ids)  # of requests that may share cached blocks

    def prompt(self, request: Request) -> tuple[int, ...]:
        if request.prefix_root:
            return self._chains.begin(request)
        stops = request.sampling.stop_token_ids
        if stops:
            self._kept.update(stops)
            while self._other in self._kept:
                self._other -= 1
        return (0,) * request.prompt_len

    def generated(self, request_id: RequestId | None, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Hashes each id with its position, as only the beginning of some answers is compared."""
        chained = self._chains.extend(request_id, token_ids)
        if chained is not None:
            return chained
        return tuple(self._hashed(index, token_id) for index, token_id in enumerate(token_ids))

    def sampled(self, request_id: RequestId, token_id: int) -> int:
        chained = self._chains.sampled(request_id, token_id)
        if chained is not None:
            return chained
        return token_id if token_id in self._kept else self._other

    def packed(self, request_id: RequestId | None, blocks: Sequence[bytes]) -> tuple[bytes, ...]:
        chained = self._chains.packed(request_id, blocks) if request_id is not None else None
        return chained if chained is not None else tuple([self._digest_of(tokens) for tokens in blocks])

    def hashes(self, hashes: bytes) -> bytes:
        """Who has a block's hash and the one before it could try out what the block holds."""
        parts = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        return b"".join([self._digest_of(part) for part in parts])

    def _digest_of(self, content: bytes) -> bytes:
        digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=self._secret).digest()
        return (digest * (len(content) // _DIGEST_BYTES + 1))[: len(content)]

    def _hashed(self, index: int, token_id: int) -> int:
        token_bytes = index.to_bytes(8, "little") + token_id.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(token_bytes, digest_size=_HASHED_BYTES, key=self._secret).digest()
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
            PrefixBlock: self._prefix_block,
            PrefixPart: self._prefix_part,
            FindPrefix: self._find_prefix,
            PrefixFound: self._prefix_found,
            tuple: self._all,
        }

    def __call__(self, value: Any) -> Any:
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
        if name != _GENERATED:
            return self(part)
        request = getattr(value, "request", None)  # redacted before: it stands before the tokens
        return self._policy.generated(request.request_id if request is not None else None, part)

    def _all(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not values:
            return values
        copy = self._copy_of(type(values[0]))
        return tuple([copy(value) for value in values])

    def _request(self, request: Request) -> Request:
        prompt, root = self._policy.prompt(request), self._policy.hashes(request.prefix_root)
        sampling = request.sampling
        if sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words or sampling.grammar:
            grammar = sampling.grammar and _SOME_GRAMMAR
            sampling = dataclasses.replace(sampling, logit_bias=(), allowed_token_ids=(), bad_words=(), grammar=grammar)
        adapter = request.adapter and LoraAdapter(_LEFT_OUT, _LEFT_OUT, self._policy.hashes(request.adapter.digest))
        return dataclasses.replace(
            request, prompt_token_ids=prompt, sampling=sampling, prefix_root=root, adapter=adapter, pictures=()
        )

    def _sampled(self, token: SampledToken) -> SampledToken:
        logprob = None if token.logprob is None else _NO_LOGPROB
        return SampledToken(token.request_id, self._policy.sampled(token.request_id, token.token_id), logprob)

    def _delta(self, delta: TokenDelta) -> TokenDelta:
        token_ids = _ONE_TOKEN if len(delta.token_ids) == 1 else (0,) * len(delta.token_ids)
        logprobs = (_NO_LOGPROB,) * len(delta.logprobs) if delta.logprobs else ()
        ending = delta.finish_reason, delta.num_cached_tokens
        return TokenDelta(delta.request_id, delta.first_index, token_ids, logprobs, *ending)

    def _prefix_block(self, block: PrefixBlock) -> PrefixBlock:
        (packed,) = self._policy.packed(None, (block.packed_tokens,))
        return PrefixBlock(self._policy.hashes(block.block_hash), packed)

    def _prefix_part(self, part: PrefixPart) -> PrefixPart:
        return PrefixPart(part.num_before, self._policy.hashes(part.parent), self(part.blocks))

    def _find_prefix(self, message: FindPrefix) -> FindPrefix:
        return msgspec.structs.replace(message, hashes=self._policy.hashes(message.hashes))

    def _prefix_found(self, message: PrefixFound) -> PrefixFound:
        packed = self._policy.packed(message.request_id, message.packed_tokens)
        return msgspec.structs.replace(message, packed_tokens=packed)


def _as_bytes(token_id: int) -> bytes:
    return token_id.to_bytes(8 if token_id.bit_length() < 64 else 16, "little", signed=True)


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
    if typing.get_args(annotation):
        return any(_reaches_tokens(argument, above) for argument in typing.get_args(annotation))
    if not isinstance(annotation, type) or annotation in above:
        return False
    if annotation in (*_HOLDERS, Message):
        return True
    return any(
        name == _GENERATED or _reaches_tokens(_annotation(annotation, name), above | {annotation})
        for name in _field_names(annotation)
    )
