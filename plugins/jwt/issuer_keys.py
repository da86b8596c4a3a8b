"""The keys of one issuer, fetched again from time to time and when a token names another one.

An issuer that cannot be reached, or that answers anything but a good set, changes nothing: what it said last goes on.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import msgspec

from alignedserve.api.errors import Unavailable
from alignedserve.config.sections.gateway import JwtIssuer
from alignedserve.core.errors import ConfigError

MAX_KEY_SET_BYTES = 256 << 10
_MAX_KEYS = 64
_MAX_TRIED = 4  # keys for one token, as a check takes a quarter of a millisecond and anyone may present one
# Kind and curve of the key that an algorithm needs.
_KINDS: dict[str, tuple[str, str | None]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", None)),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
logger = logging.getLogger(f"alignedserve.{__name__}")
AGAIN_S = 10.0  # between two fetches at least, whatever tokens name
_TIMEOUT_S = 5.0
_PART_BYTES = 16 << 10


class KeySet:
    """Keys by their ids and the algorithm that each is for."""

    def __init__(self, keys: Iterable[tuple[str | None, str, jwt.PyJWK]]) -> None:
        """`keys`: each with its id and its algorithm; several may have the same, or no id."""
        self._keys = tuple(keys)

    def find(self, kid: str | None, algorithm: str) -> tuple[jwt.PyJWK, ...]:
        """Return the keys of this id; without an id, all that the algorithm has. None of more than a few."""
        fitting = [key for key_id, name, key in self._keys if name == algorithm and kid in (key_id, None)]
        return tuple(fitting) if len(fitting) <= _MAX_TRIED else ()


class _Document(msgspec.Struct):
    keys: list[dict[str, Any]]


def parse_key_set(raw: bytes, algorithms: Sequence[str]) -> KeySet:
    try:
        listed = msgspec.json.decode(raw, type=_Document).keys
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError("it is no JWK set") from error
    if len(listed) > _MAX_KEYS:
        raise ConfigError(f"it has more than {_MAX_KEYS} keys")
    keys: list[tuple[str | None, str, jwt.PyJWK]] = []
    for jwk in listed:
        for algorithm in algorithms:
            key = _key(jwk, algorithm)
            if key is not None:
                keys.append((jwk.get("kid"), algorithm, key))
    if not keys:
        raise ConfigError(f"it has no public key for {', '.join(algorithms)}")
    return KeySet(keys)


def _key(jwk: dict[str, Any], algorithm: str) -> jwt.PyJWK | None:
    kind, curve = _KINDS[algorithm]
    is_private = "d" in jwk  # and known to whoever read it
    is_other = jwk.get("use", "sig") != "sig" or jwk.get("alg", algorithm) != algorithm
    is_other |= jwk.get("key_ops", ["verify"]) != ["verify"]
    has_id = isinstance(jwk.get("kid"), str | None)
    if is_private or is_other or not has_id or (jwk.get("kty"), jwk.get("crv")) != (kind, curve):
        return None
    try:
        return jwt.PyJWK(jwk, algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None


async def fetch(issuer: JwtIssuer) -> bytes:
    """Return an issuer's key set as it is published. Raises ConfigError saying why there is none."""
    if issuer.path is not None:
        return await asyncio.to_thread(_read, Path(issuer.path))
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(issuer.jwks, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise ConfigError(f"it answers {response.status}")
            raw = bytearray()
            async for part in response.content.iter_chunked(_PART_BYTES):
                raw += part
                _check_size(len(raw))
            return bytes(raw)
    except TimeoutError as error:
        raise ConfigError(f"it has not answered within {_TIMEOUT_S:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ConfigError(f"it cannot be reached ({type(error).__name__})") from error


def check_file(issuer: JwtIssuer) -> None:
    """Raise ConfigError if the issuer's keys are in a file that cannot be used."""
    if issuer.path is not None:
        try:
            parse_key_set(_read(Path(issuer.path)), issuer.algorithms)
        except ConfigError as error:
            raise ConfigError(f"gateway.jwt: {issuer.path}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_KEY_SET_BYTES + 1)
    except OSError as error:
        raise ConfigError(error.strerror or "it cannot be read") from error
    _check_size(len(raw))
    return raw


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_KEY_SET_BYTES:
        raise ConfigError(f"it is larger than {MAX_KEY_SET_BYTES >> 10} KiB")


class IssuerKeys:
    """Finds the keys of an issuer, while `run` does."""

    def __init__(
        self,
        issuer: JwtIssuer,
        fetch: Callable[[JwtIssuer], Awaitable[bytes]] = fetch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._issuer = issuer
        self._fetch = fetch
        self._clock = clock
        self._raw = b""
        self._keys: KeySet | None = None  # None: it was never reached
        self._fetched_s = float("-inf")  # when that was tried last
        self._fetching: asyncio.Task[None] | None = None
        self._problem = ""  # in the log
        self.version = 0  # grows with each other set: tokens are verified again

    async def find(self, kid: str | None, algorithm: str) -> tuple[jwt.PyJWK, ...]:
        """Return the keys of this id, after another fetch if it is unknown and the last one is not of just now.

        Raises Unavailable before the first fetch has succeeded.
        """
        keys = self._known(kid, algorithm)
        if not keys:
            await self.refresh(AGAIN_S)
            keys = self._known(kid, algorithm)
        if self._keys is None:
            raise Unavailable("The keys of this token's issuer cannot be fetched now.")
        return keys

    async def run(self) -> None:
        while True:
            await self.refresh(0.0)
            await asyncio.sleep(AGAIN_S if self._problem else self._issuer.refresh_s)

    async def refresh(self, age_s: float) -> None:
        if self._fetching is None and self._clock() - self._fetched_s >= age_s:
            self._fetched_s = self._clock()
            self._fetching = asyncio.create_task(self._refresh())
        if self._fetching is not None:
            await asyncio.shield(self._fetching)

    def stop(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()

    def _known(self, kid: str | None, algorithm: str) -> tuple[jwt.PyJWK, ...]:
        return () if self._keys is None else self._keys.find(kid, algorithm)

    async def _refresh(self) -> None:
        try:
            raw = await self._fetch(self._issuer)
            if raw != self._raw:
                self._keys, self._raw = parse_key_set(raw, self._issuer.algorithms), raw
                self.version += 1
            self._problem = ""
        except ConfigError as error:
            self._tell(str(error))
        finally:
            self._fetching = None

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            logger.error("the keys of %s in %s are not to be had: %s", self._issuer.issuer, self._issuer.jwks, problem)
        self._problem = problem
