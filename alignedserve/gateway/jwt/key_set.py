"""The public keys of an issuer (a JWK set, RFC 7517): which of them may verify what."""

from collections.abc import Iterable, Sequence
from typing import Any

import jwt
import msgspec

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


class KeySet:
    """Keys by their ids and the algorithm that each is for."""

    def __init__(self, keys: Iterable[tuple[str | None, str, jwt.PyJWK]]) -> None:
        """`keys`: each with its id and its algorithm; several may have the same, or no id."""
        self._keys = tuple(keys)

    def find(self, kid: str | None, algorithm: str) -> tuple[jwt.PyJWK, ...]:
        """Return the keys of this id; without an id, all that the algorithm has. None of more than a few."""
        fitting = [key for own, name, key in self._keys if name == algorithm and kid in (own, None)]
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
