"""Who sends nothing to a gateway with a certificate takes a place as others do."""

import asyncio
import ssl
from pathlib import Path

import httpx

from alignedserve.config.sections import GatewayConfig
from alignedserve.gateway.server import HttpServer, bind
from tests.gateway.support import saying, services_for
from tests.harnesses.scripted_backend import ScriptedBackend
from tests.support.servers.server_certificates import Authority


async def test_handshakes_that_do_not_end_are_counted_until_their_clients_leave(tmp_path: Path) -> None:
    authority = Authority.new(tmp_path)
    certificate, key = authority.issue()
    config = GatewayConfig(tls_certificate=str(certificate), tls_key=str(key), max_connections_per_address=3)
    server = HttpServer(services_for(ScriptedBackend(saying("hello")), config), bind("127.0.0.1", 0))
    await server.start()
    try:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
        assert await asyncio.wait_for(silent[3][0].read(), 10) == b""  # one too many
        silent[0][1].write(b"GET / HTTP/1.1\r\n\r\n")  # speaks no TLS
        await asyncio.wait_for(silent[0][0].read(), 10)
        silent[1][1].close()
        await silent[1][1].wait_closed()
        trust = ssl.create_default_context(cafile=str(authority.file))
        async with httpx.AsyncClient(verify=trust, base_url=f"https://127.0.0.1:{server.port}") as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/health", headers={"connection": "close"})).status_code == 200
        assert not silent[2][0].at_eof()
    finally:
        await server.stop()
    assert await asyncio.wait_for(silent[2][0].read(), 10) == b""
    for _, writer in silent:
        writer.close()
