"""A Redis that is named by its URL: over TLS, with a user and a password, and what is wrong with either."""

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from alignedserve.batches.stores.redis_location import RedisLocation
from alignedserve.batches.stores.redis_records import RedisRecords, check_redis
from alignedserve.cluster.batch_storage import open_batch_storage
from alignedserve.config.environment import REDIS_CA_VARIABLE, REDIS_URL_VARIABLE
from alignedserve.config.sections import BatchesConfig, ClusterConfig
from alignedserve.core.errors import ConfigError, ResourceError, StoreUnavailable
from alignedserve.messages.state import SetValue
from tests.support.servers.valkey import ValkeyServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def redis_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Redis with one user, `files`, whose password is `p@ss`."""
    options = ("--user", "default", "off", "--user", "files", "on", ">p@ss", "~*", "+@all")
    server = ValkeyServer(tmp_path_factory.mktemp("redis"), *options)
    server.start()
    yield server.socket_path
    server.kill()


@pytest.fixture(scope="module")
def key_and_certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and a certificate of 127.0.0.1 that it signs itself."""
    return _write_certificate(tmp_path_factory.mktemp("tls") / "redis.pem", datetime.timedelta(0))


def _write_certificate(path: Path, age: datetime.timedelta) -> Path:
    """Write a key and a certificate that is valid for a day, and was made so long ago."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "redis")])
    made_at = datetime.datetime.now(datetime.UTC) - age
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(made_at).not_valid_after(made_at + datetime.timedelta(days=1))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = builder.add_extension(address, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    made = builder.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(pem))
    return path


@pytest.fixture(scope="module")
def authority(key_and_certificate: Path) -> str:
    """Certificates that a client is given."""
    return key_and_certificate.read_text()


@asynccontextmanager
async def behind_tls(redis_socket: Path, certificate: Path) -> AsyncIterator[int]:
    """The port of that Redis, behind TLS, as in front of a managed one."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(65536):
            writer.write(part)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(str(redis_socket))
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer), return_exceptions=True)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def url(port: int, password: str = "p%40ss", scheme: str = "rediss") -> str:
    return f"{scheme}://files:{password}@127.0.0.1:{port}/0"


async def test_over_tls_with_a_password(redis_socket: Path, key_and_certificate: Path, authority: str) -> None:
    async with behind_tls(redis_socket, key_and_certificate) as port:
        location = RedisLocation(url(port), authority)
        assert await asyncio.to_thread(check_redis, location) is None
        records = RedisRecords(location, namespace="test")
        assert await records.commit([SetValue("a", b"1")], unchanged={"a": None})
        assert await records.read(["a"]) == [b"1"]
        await records.close()


async def test_what_is_wrong_is_said_at_the_start(
    redis_socket: Path, key_and_certificate: Path, authority: str
) -> None:
    async with behind_tls(redis_socket, key_and_certificate) as port:
        wrong = await asyncio.to_thread(check_redis, RedisLocation(url(port, "other"), authority))
        assert wrong is not None
        assert "user or password" in wrong
        unknown = await asyncio.to_thread(check_redis, RedisLocation(url(port)))
        assert unknown is not None
        assert "TLS" in unknown
        records = RedisRecords(RedisLocation(url(port)), namespace="test")
        with pytest.raises(StoreUnavailable):
            await records.read(["a"])
        await records.close()
    assert check_redis(RedisLocation(url(1))) is None  # nothing listens: it may be started later


async def test_an_expired_certificate_is_named_at_the_start(redis_socket: Path, tmp_path: Path) -> None:
    expired = _write_certificate(tmp_path / "expired.pem", datetime.timedelta(days=2))
    async with behind_tls(redis_socket, expired) as port:
        problem = await asyncio.to_thread(check_redis, RedisLocation(url(port), expired.read_text()))
    assert problem is not None
    assert "certificate has expired" in problem


def test_the_password_is_in_no_text() -> None:
    assert "p%40ss" not in repr(RedisLocation(url(1)))


@pytest.mark.parametrize("named", ["http://127.0.0.1:1", "127.0.0.1:6379", "rediss://127.0.0.1:port"])
def test_what_is_no_url_of_a_redis_is_refused(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDIS_URL_VARIABLE, named)
    config = ClusterConfig(batches=BatchesConfig(folder=str(tmp_path / "state")))
    with pytest.raises(ConfigError, match=REDIS_URL_VARIABLE):
        open_batch_storage(config)


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REDIS_URL_VARIABLE, "rediss://127.0.0.1:1")
    monkeypatch.setenv(REDIS_CA_VARIABLE, str(tmp_path / "none.pem"))
    config = ClusterConfig(batches=BatchesConfig(folder=str(tmp_path / "state")))
    with pytest.raises(ConfigError, match=REDIS_CA_VARIABLE):
        open_batch_storage(config)


def test_a_bucket_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_STATE_DIR", str(tmp_path))
    batches = BatchesConfig(folder="s3://some-bucket/x", s3_endpoint="http://127.0.0.1:1")
    with pytest.raises(ResourceError, match="s3://some-bucket/x"):
        open_batch_storage(ClusterConfig(batches=batches))
