"""Verifies tokens (JWT, RFC 8725): issuer, time, audience, signature, and the key of keys.yaml that a token stands for.

A verified token is remembered by its digest until it expires: the client's next request costs a look-up. A refusal
says which rule was broken and repeats nothing of the token.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jwt

from alignedserve.api.errors import Unauthorized
from alignedserve.config.sections.gateway import JwtIssuer
from alignedserve.process.background_tasks import start_background
from plugins.jwt.issuer_keys import IssuerKeys

MAX_TOKEN_LEN = 8192
MAX_REMEMBERED = 10_000
_LONGEST_S = 86_400  # in memory
_TYPES = ("jwt", "at+jwt", "application/at+jwt")  # of access tokens
_READING = jwt.PyJWT({"verify_signature": False})
_SIGNATURES = jwt.PyJWS()
_CLAIMS = ("iss", "aud", "exp")

_REFUSALS: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.ExpiredSignatureError, "has expired"),
    (jwt.ImmatureSignatureError, "is not valid yet"),
    (jwt.InvalidAudienceError, "is for another audience"),
    (jwt.InvalidSignatureError, "has a signature that is not its issuer's"),
    (jwt.InvalidKeyError, "is signed with a key that is too short"),
)


class _Verified(NamedTuple):
    name: str
    until_s: float
    keys: IssuerKeys
    version: int

    def holds(self, now: float) -> bool:
        return now < self.until_s and self.version == self.keys.version


class TokenVerifier:
    """Finds the name of the key that a token stands for."""

    def __init__(
        self,
        issuers: Sequence[JwtIssuer],
        make_keys: Callable[[JwtIssuer], IssuerKeys] = IssuerKeys,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: Unix time, of how long tokens are remembered."""
        self._issuers = {issuer.issuer: (issuer, make_keys(issuer)) for issuer in issuers}
        self._clock = clock
        self._verified: dict[bytes, _Verified] = {}  # by digest, the oldest first
        self._running: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Fetch the keys of all issuers, and again from time to time; return when each was tried."""
        all_keys = [keys for _, keys in self._issuers.values()]
        self._running = [start_background(keys.run(), "the keys of an issuer") for keys in all_keys]
        await asyncio.gather(*(keys.refresh(float("inf")) for keys in all_keys))

    def stop(self) -> None:
        """Fetch no more. May be repeated."""
        for task in self._running:
            task.cancel()
        for _, keys in self._issuers.values():
            keys.stop()

    def remembered(self, token: str) -> str | None:
        """Return the name of the key that a token stands for which was verified before, and still holds."""
        verified = self._verified.get(_digest_of(token))
        return verified.name if verified is not None and verified.holds(self._clock()) else None

    async def key_name(self, token: str) -> str:
        """Return the name of the key that the token stands for. Raises Unauthorized, or Unavailable while its issuer's
        keys are unknown."""
        if len(token) > MAX_TOKEN_LEN:
            raise _refused("is too long")
        digest, now = _digest_of(token), self._clock()
        verified = self._verified.get(digest)
        if verified is not None and verified.holds(now):
            return verified.name
        self._verified.pop(digest, None)
        verified = await self._verify(token, now)
        if len(self._verified) >= MAX_REMEMBERED:
            del self._verified[next(iter(self._verified))]
        self._verified[digest] = verified
        return verified.name

    async def _verify(self, token: str, now: float) -> _Verified:
        header, iss = _read(token)
        if not isinstance(iss, str) or iss not in self._issuers:
            raise _refused("is of an issuer that is not known here")
        issuer, keys = self._issuers[iss]
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in issuer.algorithms:
            raise _refused("is signed by an algorithm that is not allowed")
        fitting = await keys.find(kid, algorithm)
        if not fitting:
            raise _refused("is signed with a key that its issuer does not publish")
        version = keys.version
        key = next((candidate for candidate in fitting[:-1] if _is_signed(token, algorithm, candidate)), fitting[-1])
        claims = _checked(token, issuer, algorithm, key)
        until_s = min(int(claims["exp"]), int(now) + _LONGEST_S) + issuer.leeway_s
        return _Verified(_name_of(claims, issuer), until_s, keys, version)


def _digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read(token: str) -> tuple[dict[str, Any], Any]:
    try:
        read = _READING.decode_complete(token, options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError) as error:
        raise _refused("cannot be read") from error
    header: dict[str, Any] = read["header"]
    kind = header.get("typ", "jwt")
    if "crit" in header or not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise _refused("is of a kind that is not served here")
    return header, read["payload"].get("iss")


def _is_signed(token: str, algorithm: str, key: jwt.PyJWK) -> bool:
    try:
        _SIGNATURES.decode_complete(token, key, algorithms=[algorithm])
    except (jwt.PyJWTError, ValueError, TypeError):
        return False
    return True


def _checked(token: str, issuer: JwtIssuer, algorithm: str, key: jwt.PyJWK) -> dict[str, Any]:
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=[algorithm],
            audience=list(issuer.audience),
            issuer=issuer.issuer,
            leeway=issuer.leeway_s,
            options={"require": [*_CLAIMS, *issuer.required_claims], "enforce_minimum_key_length": True},
        )
    except jwt.MissingRequiredClaimError as error:
        raise _refused(f"lacks the claim {error.claim}") from error
    except (jwt.PyJWTError, ValueError, TypeError) as error:
        words = next((words for kind, words in _REFUSALS if isinstance(error, kind)), "cannot be read")
        raise _refused(words) from error
    return claims


def _name_of(claims: dict[str, Any], issuer: JwtIssuer) -> str:
    value = claims.get(issuer.claim)
    values = value if isinstance(value, list) else [value]
    words = [word for word in values if isinstance(word, str)]
    names = set(words if issuer.keys is None else [issuer.keys[word] for word in words if word in issuer.keys])
    if len(names) != 1:
        raise _refused(f"names {'no key' if not names else 'several keys'} in the claim {issuer.claim}")
    return names.pop()


def _refused(words: str) -> Unauthorized:
    return Unauthorized(f"The token {words}.")
