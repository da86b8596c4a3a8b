"""Fetches pictures that clients name by their URLs: by https, from hosts that the configuration lists, and no others.

Whoever names a URL decides where this process connects to. So, before a byte is sent:
1. The URL has the one form that is read: https, the name of a host, maybe a port. No user, address or odd character.
2. Its host and port are in the list.
3. The host's addresses are looked up, and all of them must be public. The connection goes to an
   address found then: a name may change its addresses meanwhile.
A redirect is followed to the same host alone, from 1 on. Bytes, time and redirects of a fetch are bounded, and so are
fetches at once, of which best effort has three quarters at most, and so has one client of each class; best effort waits
in a queue of its own. No message shows anything of a URL, or of what came from there.
"""

import asyncio
import contextlib
import ipaddress
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from typing_extensions import override
from yarl import URL

from alignedserve.api.errors import Overloaded, ResourceUnavailable, Unfetched
from alignedserve.api.work_lanes import client_of_task, is_best_effort
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import InvalidRequest

_URL = re.compile(r"https://([a-z0-9.-]{1,253})(?::([0-9]{1,5}))?(?:([/?])([!-~]*))?", re.ASCII | re.IGNORECASE)
_MAX_LABEL_LEN = 63  # between two dots of a host's name
_MAX_URL_LEN = 4096
_HTTPS_PORT = 443
_PART_BYTES = 64 << 10
_MAX_AT_ONCE, _MAX_WAITING = 16, 64
_MAX_SHARE_AT_ONCE, _MAX_SHARE_WAITING = 12, 48  # of best effort, counted apart, and of one client
_RETRY_AFTER_S = 1.0
_TOO_MANY = "Too many pictures wait to be fetched."
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429)  # what a host answers that is slow, or asked too often
_NO_SUCH_HOST = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
_HEADERS = {
    "Accept": "image/png, image/jpeg, image/webp, image/gif",
    "Accept-Encoding": "identity",
    "User-Agent": "alignedserve",
}
# None of the internet, whatever Python's own lists say: protocols' own (a cloud's metadata is at 192.0.0.192), relays,
# sites (the host of a virtual machine of QEMU is at fec0::2), documentation.
_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "fec0::/10", "3fff::/20")))
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # of IPv4, which the last four bytes are

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]  # of a host's addresses. Raises OSError


class _Target(NamedTuple):
    host: str
    port: int
    path: str  # with its query

    @property
    def url(self) -> URL:
        return URL(f"https://{self.host}:{self.port}{self.path}", encoded=True)


class _Share:
    def __init__(self) -> None:
        self.free, self.num_open = asyncio.Semaphore(_MAX_SHARE_AT_ONCE), 0


class PictureFetcher:
    """Fetches for one process. Use it from one event loop."""

    def __init__(
        self,
        *,
        look_up: LookUp | None = None,
        may_connect: Callable[[str], bool] | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        """All but None replace what is true of the internet: `look_up` the system's resolver, `may_connect` whether
        an address is public, `trust` the authorities that this system knows."""
        self._look_up = look_up or _look_up
        self._may_connect = may_connect or is_public
        self._trust = trust
        self._free, self._num_open = asyncio.Semaphore(_MAX_AT_ONCE), 0  # of real-time requests
        self._best_effort = _Share()
        self._clients: dict[tuple[str, bool], _Share] = {}  # that have some; True: of best effort

    async def fetch(self, url: str, at: str, config: GatewayConfig) -> bytes:
        """Return the content of a URL; `at`: the field with the URL.

        Raises InvalidRequest: it may not be fetched, is too large, or is not there; Unfetched: it could not be fetched
        now; Overloaded; of best effort ResourceUnavailable.
        """
        target = _target_of(url, at, config)
        try:
            async with asyncio.timeout(config.picture_fetch_timeout_s), self._place():
                return await self._fetch(target, at, config)
        except TimeoutError as error:
            raise Unfetched(f"{at}: the host has not answered within {config.picture_fetch_timeout_s:g} s.") from error
        except aiohttp.ClientError as error:
            lasting = _lasting_problem_of(error)
            if lasting is not None:
                raise _refusal(at, lasting, "image_not_fetched") from error
            raise Unfetched(f"{at}: the host cannot be reached, or does not answer as it should.") from error

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        is_last, client = is_best_effort(), client_of_task()
        shares = [self._best_effort] if is_last else []
        if client:  # else it is nobody in particular
            shares.append(self._clients.get((client, is_last)) or _Share())
        if any(share.num_open >= _MAX_SHARE_WAITING for share in shares) or (
            not is_last and self._num_open >= _MAX_WAITING
        ):
            raise (ResourceUnavailable if is_last else Overloaded)(_TOO_MANY, retry_after_s=_RETRY_AFTER_S)
        self._num_open += not is_last
        for share in shares:
            share.num_open += 1
        if client:
            self._clients[client, is_last] = shares[-1]
        try:
            async with contextlib.AsyncExitStack() as held:
                for share in shares:
                    await held.enter_async_context(share.free)
                await held.enter_async_context(self._free)
                yield
        finally:
            self._num_open -= not is_last
            for share in shares:
                share.num_open -= 1
            if client and not shares[-1].num_open:
                del self._clients[client, is_last]

    async def _fetch(self, target: _Target, at: str, config: GatewayConfig) -> bytes:
        async with self._session(at) as session:
            for _ in range(config.max_picture_redirects + 1):
                async with session.get(target.url, allow_redirects=False) as response:
                    if response.status not in _REDIRECTS:
                        return await _content_of(response, at, config)
                    target = _redirected(target, response.headers.get("Location", ""), at, config)
        problem = f"it is redirected more than {config.max_picture_redirects} times"
        raise _refusal(at, problem, "image_not_fetched")

    def _session(self, at: str) -> aiohttp.ClientSession:
        if self._trust is None:
            self._trust = ssl.create_default_context()
        resolver = _CheckedResolver(self._look_up, self._may_connect, at)
        connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True, ssl=self._trust)
        return aiohttp.ClientSession(
            connector=connector, headers=_HEADERS, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        )


class _CheckedResolver(AbstractResolver):
    def __init__(self, look_up: LookUp, may_connect: Callable[[str], bool], at: str) -> None:
        self._look_up, self._may_connect, self._at = look_up, may_connect, at

    @override
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._look_up(host, port)
        if not all(self._may_connect(address) for address in addresses):
            raise _refusal(self._at, "the address of its host is not a public one", "invalid_image_url")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    @override
    async def close(self) -> None: ...


def is_public(address: str) -> bool:
    """Return whether an address is one of the internet, and not of this host, its network or a translation to them."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ipaddress.IPv4Address(ip.packed[-4:]) if ip in _TRANSLATED else ip.ipv4_mapped or ip.sixtofour or ip
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or any(ip in network for network in _SPECIAL))


async def _look_up(host: str, port: int) -> Sequence[str]:
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys([str(entry[4][0]) for entry in entries]))


def _target_of(url: str, at: str, config: GatewayConfig) -> _Target:
    if not config.picture_hosts:
        raise _refusal(at, "pictures are not fetched from the network; send a data URL", "invalid_image_url")
    match = _URL.fullmatch(url) if len(url) <= _MAX_URL_LEN else None
    if match is None:
        problem = "pictures are fetched by URLs of https alone, of a host's name and a path"
        raise _refusal(at, problem, "invalid_image_url")
    host, port, begin, rest = match.groups()
    path = f"{'/?' if begin == '?' else '/'}{rest or ''}".partition("#")[0]
    target = _Target(host.lower(), int(port or _HTTPS_PORT), path)
    if not all(0 < len(label) <= _MAX_LABEL_LEN for label in host.split(".")):
        raise _refusal(at, "its host has a name that none can have", "invalid_image_url")
    if not any(_is_listed(target, entry) for entry in config.picture_hosts):
        raise _refusal(at, "its host is not one that pictures are fetched from", "invalid_image_url")
    return target


def _is_listed(target: _Target, entry: str) -> bool:
    name, _, port = entry.partition(":")
    if target.port != int(port or _HTTPS_PORT):
        return False
    return target.host.endswith(name[1:]) and target.host != name[1:] if name[0] == "*" else target.host == name


def _redirected(target: _Target, location: str, at: str, config: GatewayConfig) -> _Target:
    try:
        location = str(target.url.join(URL(location[: _MAX_URL_LEN + 1], encoded=True)))
    except ValueError:
        location = ""
    match = _URL.fullmatch(location)
    if match is None or (match[1].lower(), int(match[2] or _HTTPS_PORT)) != target[:2]:
        raise _refusal(at, "its host redirects to another one", "image_not_fetched")
    return _target_of(location, at, config)


async def _content_of(response: aiohttp.ClientResponse, at: str, config: GatewayConfig) -> bytes:
    if response.status >= 500 or response.status in _PASSING:
        raise Unfetched(f"{at}: the host answers {response.status}.")
    if response.status != 200:
        raise _refusal(at, f"its host answers {response.status}", "image_not_fetched")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _refusal(at, "its host compresses it, which nobody asked for", "image_not_fetched")
    most, raw = config.max_picture_bytes, bytearray()
    is_large = (response.content_length or 0) > most
    while not is_large and (part := await response.content.read(_PART_BYTES)):
        raw += part
        is_large = len(raw) > most
    if is_large:
        raise _refusal(at, f"a picture may have at most {most} bytes", "image_too_large")
    if not raw:
        raise _refusal(at, "the picture is empty", "invalid_image")
    return bytes(raw)


def _refusal(at: str, problem: str, code: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for {at}: {problem}.", param=at, code=code)


def _lasting_problem_of(error: aiohttp.ClientError) -> str | None:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "the certificate of its host is not trusted"
    if isinstance(error, aiohttp.ClientConnectorDNSError) and error.os_error.errno in _NO_SUCH_HOST:
        return "its host is not found"
    return None
