"""Keeps web pages out of a gateway that anyone on its host may call.

A page whose name resolves to this host (DNS rebinding) could read every chat and file: its requests name it.
"""

import re
from ipaddress import ip_address

from starlette.types import Scope

from alignedserve.api.errors import Forbidden
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest

_AUTHORITY = r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::\d{1,5})?"
_HOST = re.compile(_AUTHORITY, re.ASCII | re.IGNORECASE)
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_AUTHORITY}", re.ASCII | re.IGNORECASE)
_LOCALHOST = "localhost"


def check_names(scope: Scope, config: GatewayConfig, *, is_open: bool) -> None:
    """Raise InvalidRequest for a request of HTTP/1.1 without one Host.

    On loopback without keys (`is_open`): Forbidden for a Host or Origin by a name that is not configured.
    """
    hosts = _values(scope, b"host")
    if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
        raise InvalidRequest("A request needs one Host header.", code="invalid_host")
    if not (is_open and config.is_local):
        return
    if not all(_is_allowed(_HOST.fullmatch(host), config) for host in hosts):
        raise _refusal("Host", "host_not_allowed")
    if "*" in config.cors_origins:
        return
    for origin in _values(scope, b"origin"):
        if origin not in config.cors_origins and not _is_allowed(_ORIGIN.fullmatch(origin), config):
            raise _refusal("Origin", "origin_not_allowed")


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]


def _is_allowed(authority: re.Match[str] | None, config: GatewayConfig) -> bool:
    if authority is None:
        return False
    name = (authority[1] or authority[2]).lower()
    try:
        return bool(ip_address(name))
    except ValueError:
        return name == _LOCALHOST or name in config.host_names


def _refusal(header: str, code: str) -> Forbidden:
    message = f"Without keys the {header} must be an IP address, localhost or a name of gateway.host_names."
    return Forbidden(message, param=header, code=code)
