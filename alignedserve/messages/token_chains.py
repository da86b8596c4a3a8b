"""Replacements for the tokens of contexts that may share cached blocks, in recordings without tokens.

Decisions about such contexts depend on where two of them stop being equal, and on nothing else. So a token is replaced
by a digest of everything up to it, under a secret that is thrown away: equal beginnings stay equal, of what follows
nothing can be told, and no token can be guessed by itself.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request

MAX_TOKENS = 1 << 22  # of contexts that are known at a time, 8 bytes each; the oldest are forgotten
_DIGEST_BYTES = 16
_MAX_TOKEN = (1 << 31) - 1  # as packed
_FIRST = 1 << 30  # replacements are at least this: ids that no model has


@dataclass(slots=True)
class _Chain:
    """One context so far."""

    digest: bytes
    stops: frozenset[int]
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    replaced: "array[int]" = field(default_factory=lambda: array("i"))


class TokenChains:
    """The contexts of requests by id, token by token. Tokens in `kept` are replaced by themselves."""

    def __init__(self, secret: bytes, kept: frozenset[int], *, max_tokens: int = MAX_TOKENS) -> None:
        self._secret = secret
        self._kept = kept
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
        return self.extend(request.request_id, request.prompt_token_ids) or ()

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
        chain.digest = digest = self._digest(chain.digest + token_id.to_bytes(8, "little", signed=True))
        replaced = token_id if token_id in self._kept else _FIRST | int.from_bytes(digest[:4], "little") & (_FIRST - 1)
        chain.token_ids.append(token_id & _MAX_TOKEN)
        chain.replaced.append(replaced & _MAX_TOKEN)
        self._num_tokens += 1
        return replaced

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=self._secret).digest()

    def _forget(self, request_id: RequestId) -> None:
        chain = self._chains.pop(request_id, None)
        if chain is not None:
            self._num_tokens -= len(chain.token_ids)
