"""Words for a server that could not be reached, for our own clients."""

import errno
import os
import socket
import ssl
from collections.abc import Iterator

from alignedserve.config.environment import AUTHORITY_VARIABLE, authority_path
from alignedserve.core.errors import ConfigError, NothingListens, PeerLost


def trust_for(url: str) -> ssl.SSLContext | None:
    """Return the TLS settings for a server; None: its address is not of https. Raises ConfigError. Known are the
    system's authorities (or those of SSL_CERT_FILE and SSL_CERT_DIR, which OpenSSL reads), and those in the file that
    ALIGNEDSERVE_CA names."""
    if not url.startswith("https://"):
        return None
    context, path = ssl.create_default_context(), authority_path()
    if path is not None:
        try:
            context.load_verify_locations(path)
        except OSError as error:  # SSLError is one
            reason = "holds no certificates in PEM" if isinstance(error, ssl.SSLError) else "cannot be read"
            raise ConfigError(f"{AUTHORITY_VARIABLE} names {path}, which {reason}") from error
    return context


def untrusted(url: str, error: BaseException | None) -> str | None:
    """Return what to do about a connection that failed for its certificate or for want of TLS; None: another reason."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # aiohttp's errors share these classes without their attributes.
        reason = getattr(error, "verify_message", None) or getattr(error, "reason", None)
        if isinstance(error, ssl.SSLCertVerificationError) and reason:
            return (
                f"the certificate of {url} is not trusted ({reason.rstrip('.')}); "
                f"set {AUTHORITY_VARIABLE} to the file of the authority that has signed it"
            )
        if isinstance(error, ssl.SSLError) and reason:
            return f"{url} does not answer with TLS ({reason}); its address may begin with http://"
        error = error.__cause__ or error.__context__
    return None


_CLOSED = ("ServerDisconnectedError", "RemoteDisconnected")  # of aiohttp and of http.client: neither is loaded here


def unreachable(url: str, error: BaseException) -> PeerLost:
    if (distrust := untrusted(url, error)) is not None:
        return PeerLost(distrust)
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno == errno.ECONNREFUSED:
            return NothingListens(url)
        if (words := _words(url, cause)) is not None:
            return PeerLost(words)
    return PeerLost(_other(url, error))


def _words(url: str, error: BaseException) -> str | None:
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError | OSError):
        return f"{url} is no address of a server"
    if isinstance(error, socket.gaierror):
        return f"no host is known by the name in {url} ({error.strerror})"
    if isinstance(error, TimeoutError):
        return f"{url} does not answer in time"
    if not isinstance(error, OSError) or error.errno is None or error.errno < 0:
        return None
    return f"nothing answers at {url} ({os.strerror(error.errno)})"


def closed_in_clear(url: str, error: BaseException) -> str:
    """Return the hint that a server which closes connections in clear may want TLS; empty: it is no such case."""
    is_closed = url.startswith("http://") and type(error).__name__ in _CLOSED
    return "; its address may begin with https://" if is_closed else ""


def _other(url: str, error: BaseException) -> str:
    if hint := closed_in_clear(url, error):
        return f"{url} closes the connection without an answer{hint}"
    return f"nothing answers at {url} ({type(error).__name__})"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    yield from reversed(chain)
