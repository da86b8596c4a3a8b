"""Mutual TLS between hosts: every process of a cluster has a certificate of the cluster's own authority.

A certificate proves a process's name, in addition to the cluster's secret; without one of this authority no byte of a
message is read. Certificates live as long as the cluster: they are made when it starts, are handed out with a process's
specification, and are valid on clocks that are some hours apart.
"""

import asyncio
import datetime
import logging
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from alignedserve.core.errors import ConfigError, ProtocolError
from alignedserve.disk.durable import LastSeen

_CLOCK_SKEW = datetime.timedelta(days=1)
_LIFETIME = datetime.timedelta(days=3650)  # longer than any cluster runs: an expired one would stop it


@dataclass(frozen=True, slots=True)
class Credentials:
    """One process's certificate and key, with the trusted authority. All in PEM."""

    authority: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)  # never in a log

    def listener_context(self) -> ssl.SSLContext:
        """Return the TLS settings of a process that accepts connections: TLS 1.3, certificates on both ends."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def dialler_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # a certificate has the name of a process, which may move to another host
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        _load_chain(context, self.private_key + self.certificate)
        return context


class CertificateAuthority:
    """Issues the certificates of one cluster. Its key is never written to a disk."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self._name = certificate.subject

    @classmethod
    def new(cls, cluster_id: str) -> "CertificateAuthority":
        key, name = ec.generate_private_key(ec.SECP256R1()), _named(f"AlignedServe {cluster_id}")
        builder = _builder(name, name, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        return cls(key, builder.sign(key, hashes.SHA256()))

    @classmethod
    def from_pem(cls, key: bytes, certificate: bytes) -> "CertificateAuthority":
        """Return the authority that `pem` described. Raises ValueError or TypeError when it describes none."""
        private = serialization.load_pem_private_key(key, password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise TypeError("the key of another kind of authority")
        return cls(private, x509.load_pem_x509_certificate(certificate))

    @property
    def pem(self) -> tuple[bytes, bytes]:
        """Return key and certificate; agents keep both in memory for the next driver."""
        return _private_pem(self._key), _pem(self._certificate)

    def issue(self, process_name: str) -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(process_name), self._name, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = builder.add_extension(both_ends, critical=False).sign(self._key, hashes.SHA256())
        return Credentials(_pem(self._certificate), _pem(certificate), _private_pem(key))


def check_certificate(peer_certificate: dict[str, Any] | None, process_name: str) -> None:
    """Check that a peer's verified certificate (in the form of `ssl`) names the claimed process.
    Raises ProtocolError: it has the certificate of another process."""
    parts = [part for parts in (peer_certificate or {}).get("subject", ()) for part in parts]
    if dict(parts).get("commonName") != process_name:
        raise ProtocolError("the peer's certificate is of another process than its name says")


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _CLOCK_SKEW).not_valid_after(now + _LIFETIME)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("credentials"), "wb") as in_memory:  # without a name in any folder
            in_memory.write(pem)
            in_memory.flush()
            context.load_cert_chain(f"/proc/self/fd/{in_memory.fileno()}")
    else:  # macOS: this user's alone, for this moment
        with tempfile.NamedTemporaryFile() as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(file.name)


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
