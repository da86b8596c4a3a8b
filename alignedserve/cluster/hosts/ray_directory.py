"""Keeps what a cluster's processes publish in Ray's own key-value store, under Ray's authentication.

It is for what changes when processes come up: addresses, and what the cluster consists of. Never for requests.
"""

from dataclasses import dataclass

from ray.exceptions import RayError
from ray.experimental import internal_kv

from alignedserve.core.errors import PeerLost

NAMESPACE = "alignedserve"  # of keys and named actors
_RAY_ERRORS = (RayError, RuntimeError, OSError, AttributeError)  # the last: this process has left Ray


@dataclass(frozen=True, slots=True)
class RayDirectory:
    """The Directory of one cluster."""

    cluster_id: str

    def publish(self, name: str, entry: str) -> None:
        put(self._key(name), entry.encode())

    def look_up(self, name: str) -> str | None:
        entry = get(self._key(name))
        return entry.decode() if entry is not None else None

    def _key(self, name: str) -> str:
        return f"{self.cluster_id}/{name}"


def put(key: str, value: bytes) -> None:
    """Store a value. Raises PeerLost when Ray's head does not answer."""
    try:
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)
    except _RAY_ERRORS as error:
        raise PeerLost(f"Ray's head does not answer: {error}") from error


def get(key: str) -> bytes | None:
    """Return a value; None: there is none. Raises PeerLost when Ray's head does not answer."""
    try:
        value: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    except _RAY_ERRORS as error:
        raise PeerLost(f"Ray's head does not answer: {error}") from error
    return value


def keys(prefix: str) -> list[str]:
    """Return every key that begins like this, in order. Raises PeerLost when Ray's head does not answer."""
    try:
        found = internal_kv._internal_kv_list(prefix, namespace=NAMESPACE)
    except _RAY_ERRORS as error:
        raise PeerLost(f"Ray's head does not answer: {error}") from error
    return sorted(key.decode() for key in found)


def delete(prefix: str) -> None:
    """Delete every key that begins like this. Raises PeerLost when Ray's head does not answer."""
    try:
        internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=NAMESPACE)
    except _RAY_ERRORS as error:
        raise PeerLost(f"Ray's head does not answer: {error}") from error
