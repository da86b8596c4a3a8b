"""Mutual TLS between hosts: every process of a cluster has a certificate of the cluster's own authority.

A certificate proves a process's name, in addition to the cluster's secret; without one of this authority no byte of a
message is read. Certificates live as long as the cluster: they are made when it starts, are handed out with a process's
specification, and are valid on clocks that are some hours apart.
"""

import datetime
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from alignedserve.core.errors import ProtocolError

_CLOCK_SKEW = datetime.timedelta(days=1)
_LIFETIME = datetime.timedelta(days=3650)  # longer than any cluster runs: an expired one would stop it


@dataclass(frozen=True, slots=True)
class Credentials:
    """One process's certificate and key, and the authority that it believes. All in PEM."""

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
        """Return a new authority for this cluster."""
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
        """Return its key and its certificate, for the memory of those who keep them for the cluster's next driver."""
        return _private_pem(self._key), _pem(self._certificate)

    def issue(self, process_name: str) -> Credentials:
        """Return new credentials for the process with this name."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(process_name), self._name, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = builder.add_extension(both_ends, critical=False).sign(self._key, hashes.SHA256())
        return Credentials(_pem(self._certificate), _pem(certificate), _private_pem(key))


def check_certificate(peer_certificate: dict[str, Any] | None, process_name: str) -> None:
    """Check that the other end's verified certificate, as `ssl` describes it, is of the process that it claims to be.

    Raises ProtocolError: it has the certificate of another process.
    """
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
