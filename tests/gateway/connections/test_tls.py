"""HTTPS at the gateway: who is answered, certificates that change while it serves, pairs that cannot be used."""

import asyncio
import os
import ssl
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from alignedserve.cli.batch.client import BatchClient
from alignedserve.cli.commands.top import _get
from alignedserve.client.openai_client import OpenAiClient
from alignedserve.client.unreachable import trust_for
from alignedserve.config.sections import GatewayConfig
from alignedserve.core.errors import ConfigError, PeerError, PeerLost
from alignedserve.gateway.server import HttpServer, bind
from alignedserve.process.tls import ServerCertificate
from tests.gateway.support import saying, services_for
from tests.harnesses.scripted_backend import ScriptedBackend
from tests.support.marks import each
from tests.support.servers.server_certificates import Authority

ROOT = Path(__file__).parents[3]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.new(tmp_path)


@asynccontextmanager
async def serving(certificate: Path, key: Path) -> AsyncIterator[HttpServer]:
    config = GatewayConfig(tls_certificate=str(certificate), tls_key=str(key))
    server = HttpServer(services_for(ScriptedBackend(saying("the quick brown fox")), config), bind("127.0.0.1", 0))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.file))


async def shown_certificate(port: int, authority: Authority) -> bytes:
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority))
    connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
    certificate = connection.getpeercert(binary_form=True)
    writer.close()
    assert certificate is not None
    return certificate


async def test_a_client_that_trusts_the_authority_is_answered(authority: Authority) -> None:
    async with serving(*authority.issue()) as server:
        url = f"https://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(verify=trusting(authority)) as client:
            answer = await client.post(f"{url}/v1/chat/completions", json=CHAT)
            assert answer.json()["choices"][0]["message"]["content"] == "the quick brown fox"
            async with client.stream("POST", f"{url}/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
                assert [line async for line in stream.aiter_lines()][-2] == "data: [DONE]"
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get(f"{url}/health")


async def test_the_image_finds_a_gateway_healthy_with_a_certificate_and_without(authority: Authority) -> None:
    check = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["alignedserve"]["healthcheck"]["test"][-1]
    async with serving(*authority.issue()) as server:
        port = server.port
        await asyncio.to_thread(exec, check.replace("8000", str(port)), {})
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(exec, check.replace("8000", str(port)), {})
    plain = HttpServer(services_for(ScriptedBackend(saying("hello")), GatewayConfig()), bind("127.0.0.1", 0))
    await plain.start()
    await asyncio.to_thread(exec, check.replace("8000", str(plain.port)), {})
    await plain.stop()


async def test_versions_of_tls_before_1_2_are_refused(authority: Authority) -> None:
    async with serving(*authority.issue()) as server:
        old = trusting(authority)
        old.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            old.minimum_version = ssl.TLSVersion.TLSv1_1
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=old)


async def test_a_certificate_that_changes_is_shown_to_new_connections_and_open_ones_stay(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.process.tls.LOOK_S", 0.01)
    certificate, key = authority.issue()
    async with serving(certificate, key) as server, httpx.AsyncClient(verify=trusting(authority)) as client:
        url = f"https://127.0.0.1:{server.port}/health"
        before = await shown_certificate(server.port, authority)
        await client.get(url)
        newer, newer_key = authority.issue("newer")
        os.replace(newer_key, key)  # for a moment the key is of another certificate
        await asyncio.sleep(0.05)
        assert await shown_certificate(server.port, authority) == before
        os.replace(newer, certificate)
        async with asyncio.timeout(10):
            while await shown_certificate(server.port, authority) == before:  # a handshake takes its time
                pass
        assert (await client.get(url)).status_code == 200  # over the connection that it has


CASES = {
    "another_key": "is not the key of the certificate",
    "expired": "has expired",
    "not_yet": "is not valid before",
    "no_certificate": "holds no certificate in PEM",
    "no_key": "holds no key in PEM",
    "absent": r"tls_certificate: .* cannot be read \(No such file",
    "absent_key": r"tls_key: .* cannot be read \(No such file",
    "pass_phrase": "has a pass phrase",
}


@each("problem", list(CASES))
def test_what_cannot_be_used_is_named_and_what_is_served_goes_on(
    problem: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = authority.issue()
    served = ServerCertificate(str(certificate), str(key))
    bad, bad_key = {
        "another_key": lambda: (certificate, authority.issue("other")[1]),
        "expired": lambda: authority.issue("old", days=(-9, -1)),
        "not_yet": lambda: authority.issue("future", days=(1, 9)),
        "no_certificate": lambda: (key, key),
        "no_key": lambda: (certificate, certificate),
        "absent": lambda: (certificate.with_suffix(".none"), key),
        "absent_key": lambda: (certificate, key.with_suffix(".none")),
        "pass_phrase": lambda: authority.issue("hidden", password=b"quiet"),
    }[problem]()
    with pytest.raises(ConfigError, match=CASES[problem]):
        ServerCertificate(str(bad), str(bad_key))
    for path, other in ((certificate, bad), (key, bad_key)):
        if other.exists():
            path.write_bytes(other.read_bytes())
        else:
            path.unlink()
    assert not served.reload()
    assert "the certificate before goes on" in caplog.text
    assert not served.reload_if_changed()  # said once


@each("setting", ["tls_certificate", "tls_key"])
def test_a_certificate_and_its_key_are_named_together(setting: str) -> None:
    settings: Any = {setting: "/etc/tls.pem"}
    with pytest.raises(ConfigError, match="must name a file where gateway"):
        GatewayConfig(**settings)
    with pytest.raises(ConfigError, match="absolute"):
        GatewayConfig(tls_certificate="tls.pem", tls_key="tls.pem")


async def test_our_own_client_believes_the_authority_that_is_named(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(*authority.issue()) as server:
        url = f"https://127.0.0.1:{server.port}"
        async with OpenAiClient(url=url) as client:
            with pytest.raises(PeerLost, match=r"is not trusted .*set ALIGNEDSERVE_CA"):
                await client.model_name()
        monkeypatch.setenv("ALIGNEDSERVE_CA", str(authority.file))
        async with OpenAiClient(url=url) as client, BatchClient(url=url, api_key=None, say=print) as batches:
            assert (await client.model_name(), await batches.models()) == ("tiny", ("tiny",))
        assert (await asyncio.to_thread(_get, url))[0] == 200
        async with OpenAiClient(url=url.replace("https", "http")) as client:
            with pytest.raises(PeerError):
                await client.model_name()


def test_an_authority_that_cannot_be_read_is_named(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, problem in ((authority.folder / "none", "cannot be read"), (authority.issue()[1], "no certificates")):
        monkeypatch.setenv("ALIGNEDSERVE_CA", str(path))
        with pytest.raises(ConfigError, match=problem):
            trust_for("https://127.0.0.1")
