"""The certificate that a gateway shows its clients, read again when its files change.

A new pair of certificate and key is tried in TLS settings of its own before connections get it: one that does not fit,
has expired or cannot be read is named in the log, and the one before goes on. Open connections keep what they began
with.
"""

import asyncio
import datetime
import logging
import ssl
from pathlib import Path

from cryptography import x509

from alignedserve.core.errors import ConfigError
from alignedserve.disk.durable import LastSeen

logger = logging.getLogger(__name__)

LOOK_S = 2.0  # between looks at the files


class ServerCertificate:
    """A certificate chain with its key, in PEM files of which the second may be the first."""

    def __init__(self, certificate: str, key: str) -> None:
        """Read both. Raises ConfigError saying which setting to change."""
        self._certificate, self._key = Path(certificate), Path(key)
        self._files = LastSeen(self._certificate, self._key)
        self._files.has_changed()
        self._current = self._load()
        # Connections are accepted with these settings, and get the current ones when a client begins to speak.
        self.context = self._load()
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current

    def reload(self) -> bool:
        """Read the files again; return whether new connections get what is there now."""
        self._files.has_changed()
        return self._read()

    def reload_if_changed(self) -> bool:
        """Read the files again if they are others than at the last look; return whether they were taken."""
        return self._files.has_changed() and self._read()

    def _read(self) -> bool:
        try:
            self._current = self._load()
        except ConfigError as error:
            logger.error("%s; the certificate before goes on", error)
            return False
        logger.info("new connections get the certificate in %s", self._certificate)
        return True

    async def watch(self) -> None:
        """Look for changes for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.reload_if_changed()

    def _load(self) -> ssl.SSLContext:
        check_period(self._certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # A key with a pass phrase would ask for it at the terminal.
            context.load_cert_chain(self._certificate, self._key, password=_no_pass_phrase)
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise ConfigError(self._problem(error)) from error
        return context

    def _problem(self, error: Exception) -> str:
        certificate, key = self._certificate, self._key
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            return f"gateway.tls_key: {key} is not the key of the certificate in {certificate}"
        if isinstance(error, PermissionError | FileNotFoundError):
            return f"gateway.tls_key: {key} cannot be read ({error.strerror})"
        if isinstance(error, ValueError):
            return (
                f"gateway.tls_key: {key} has a pass phrase; give the key without one, in a file that others cannot read"
            )
        return f"gateway.tls_key: {key} holds no key in PEM that TLS can use"


def check_period(path: Path) -> None:
    """Check that the first certificate of a file is valid today. Raises ConfigError."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"gateway.tls_certificate: {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"gateway.tls_certificate: {path} holds no certificate in PEM") from error
    now = datetime.datetime.now(datetime.UTC)
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if until <= now:
        raise ConfigError(f"gateway.tls_certificate: the one in {path} has expired, at {until:%Y-%m-%d %H:%M} UTC")
    if since > now:
        raise ConfigError(f"gateway.tls_certificate: the one in {path} is not valid before {since:%Y-%m-%d %H:%M} UTC")


def _no_pass_phrase() -> str:
    raise ValueError("the key has a pass phrase")
