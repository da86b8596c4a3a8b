"""Certificates of servers for tests: an authority of their own, pairs of files that it has signed."""

import datetime
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """A private authority whose certificate is in a file, for clients."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    name: x509.Name

    @classmethod
    def new(cls, folder: Path) -> "Authority":
        key, name = ec.generate_private_key(ec.SECP256R1()), _name("tests")
        certificate = (
            _dated(x509.CertificateBuilder(), -1, 30)
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_SIGNS, critical=True)
            .sign(key, hashes.SHA256())
        )
        (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return cls(folder, key, name)

    @property
    def file(self) -> Path:
        return self.folder / "ca.pem"

    def issue(
        self, label: str = "server", *, days: tuple[int, int] = (-1, 30), password: bytes | None = None
    ) -> tuple[Path, Path]:
        """Write a certificate of 127.0.0.1 and its key, valid from and until so many days from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _dated(x509.CertificateBuilder(), *days)
            .subject_name(_name(label))
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")]), False
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False)
            .sign(self.key, hashes.SHA256())
        )
        paths = self.folder / f"{label}.crt", self.folder / f"{label}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
        return paths


_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _dated(builder: x509.CertificateBuilder, since: int, until: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return builder.not_valid_before(now + since * _DAY).not_valid_after(now + until * _DAY)
