"""The state of Ray's head, kept so that it can come back: in the Redis that is named by URL."""

import shlex
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from alignedserve.core.errors import ConfigError

_DEFAULT_PORT = 6379
HEAD_RETURNS_S = 600  # for which all others wait for a head whose state is in a Redis


class RayStorage(NamedTuple):
    """Options and variables with which `ray start --head` keeps its state in a Redis."""

    environment: dict[str, str]
    options: tuple[str, ...]

    def shell(self) -> str:
        """Return the line of shell that sets the environment, and the options as the shell's arguments."""
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        arguments = shlex.join(("set", "--", *self.options))
        return f"export {exports}; {arguments}" if exports else arguments


def ray_storage(redis_url: str | None, cluster_name: str, authority: Path | None = None) -> RayStorage:
    """Return how Ray's head uses this Redis; None: it keeps its state in its own memory.

    `cluster_name`: its keys begin with it, so that several clusters can share a Redis. `authority`: file of the
    certificates that sign that of a Redis over TLS; None: those that the system trusts. Raises ConfigError for a URL
    that Ray cannot use.
    """
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
