"""Keeps what a cluster's processes publish in Ray's own key-value store, under Ray's authentication.

It is for what changes when processes come up: addresses, and what the cluster consists of. Never for requests.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from ray.exceptions import RayError
from ray.experimental import internal_kv

from alignedserve.core.errors import ConfigError, PeerLost

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
        listed = internal_kv._internal_kv_list(prefix, namespace=NAMESPACE)
    except _RAY_ERRORS as error:
        raise PeerLost(f"Ray's head does not answer: {error}") from error
    return sorted(key.decode() for key in listed)


def delete(prefix: str) -> None:
    """Delete every key that begins like this. Raises PeerLost when Ray's head does not answer."""
    try:
        internal_kv._internal_kv_del(prefix, del_by_prefix=True, namespace=NAMESPACE)
    except _RAY_ERRORS as error:
        raise PeerLost(f"Ray's head does not answer: {error}") from error


_DEFAULT_PORT = 6379
HEAD_RETURNS_S = 600  # for which all others wait for a head whose state is in a Redis


class RayStorage(NamedTuple):
    """Options and variables with which `ray start --head` keeps its state in a Redis."""

    environment: dict[str, str]
    options: tuple[str, ...]

    def shell(self) -> str:
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        arguments = shlex.join(("set", "--", *self.options))
        return f"export {exports}; {arguments}" if exports else arguments


def ray_storage(redis_url: str | None, cluster_name: str, authority: Path | None = None) -> RayStorage:
    """Return how Ray's head uses this Redis; None: it keeps its state in its own memory. `cluster_name`: prefix of all
    keys; several clusters can share a Redis. `authority`: file with the certificate authority of a Redis over TLS;
    None: the system's authorities. Raises ConfigError for a URL that Ray cannot use."""
    if redis_url is None:
        return RayStorage({}, ())
    parts = urlsplit(redis_url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"the Redis for Ray's state has no port that can be one: {error}") from error
    if parts.scheme not in ("redis", "rediss") or not host:
        raise ConfigError("the Redis for Ray's state must be redis://HOST:PORT, or rediss:// for TLS")
    if parts.path not in ("", "/", "/0"):
        raise ConfigError("Ray keeps its state in database 0 of a Redis; leave the number out, or name another Redis")
    is_encrypted = parts.scheme == "rediss"
    scheme = "rediss://" if is_encrypted else ""
    reachable = f"[{host}]" if ":" in host else host
    return RayStorage(
        {
            **waiting_for_head(redis_url),
            "RAY_REDIS_ADDRESS": f"{scheme}{reachable}:{port or _DEFAULT_PORT}",
            "RAY_external_storage_namespace": cluster_name,
            **({"RAY_REDIS_CA_CERT": str(authority.absolute())} if is_encrypted and authority is not None else {}),
        },
        (f"--redis-username={unquote(parts.username or '')}", f"--redis-password={unquote(parts.password or '')}"),
    )


def waiting_for_head(redis_url: str | None) -> dict[str, str]:
    """Return the environment of `ray start` on every node with which it waits for a head that can come back."""
    return {"RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_RETURNS_S)} if redis_url is not None else {}
